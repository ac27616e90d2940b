"""What an engine is, from its record, its list of layers and, on a GPU, from the engine itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import BundleError, ForeignEngineError, MissingExtraError
from .device import first_gpu
from .loading import load_engine
from .plan_file import Plan, find_plan, read_header


def engine_facts(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Returns the facts of an engine as plain data.

    `read_from` says whether they were read from the engine, which needs a GPU, or written down when
    it was built; `not_loaded` why it was not loaded, on a machine with a GPU. Raises what
    `find_plan` raises, and `EngineError` for an engine that is damaged.
    """
    plan = find_plan(path, trust=trust)
    header = read_header(path)
    facts: dict[str, Any] = {
        "file": str(path),
        "flavour": plan.flavour.name,
        "bytes": path.stat().st_size,
        "version": header.version if header is not None else None,
        "read_from": "header",
    }
    if plan.record is not None:
        facts |= plan.record.as_json() | {"file": str(path), "read_from": "record"}
        facts["layers"] = _listing(path.parent / plan.record.layers)
    if first_gpu() is not None:
        try:
            facts |= {"inspector": _inspected(plan), "read_from": "engine"}
        except (ForeignEngineError, MissingExtraError) as error:
            facts["not_loaded"] = error.message
    return facts


def _listing(path: Path) -> list[dict[str, str]]:
    """The products and convolutions that were written down beside the engine."""
    try:
        layers: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))["layers"]
    except (OSError, ValueError, KeyError) as error:
        raise BundleError(
            f"{path}: not a readable list of layers ({error})", hint="build the engine again"
        ) from error
    return layers


def _inspected(plan: Plan) -> Any:
    """What TensorRT's own inspector says of the engine, layer by layer."""
    trt, _runtime, engine = load_engine(plan)
    inspector = engine.create_engine_inspector()
    return json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
