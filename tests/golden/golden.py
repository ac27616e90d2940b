"""Recorded results that a change of the code's shape must leave as they are.

`MOEXPORT_GOLDEN=write pytest tests/golden …` records them anew; the commit that does says why.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
WRITES = os.environ.get("MOEXPORT_GOLDEN") == "write"

DECISIVE = ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy", "transformers")
"""Packages whose versions change graphs, manifests or messages."""


@cache
def other_versions() -> str:
    """Returns how the installed packages differ from `constraints.txt`; empty where they do not."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    there = {each.name.lower().replace("_", "-") for each in metadata.distributions() if each.name}
    found = {
        name: metadata.version(name).partition("+")[0] if name in there else "is not installed"
        for name in DECISIVE
    }
    wrong = {name: version for name, version in found.items() if pinned[name] != version}
    return ", ".join(f"{name} {version}" for name, version in wrong.items())


def check(name: str, found: Any) -> None:
    """Compares what was found with `recorded/NAME.json`, or writes it there.

    The test is skipped with other packages than `constraints.txt` pins.
    """
    if other_versions():
        pytest.skip(f"recorded with the versions of constraints.txt, not {other_versions()}")
    place = RECORDED / f"{name}.json"
    found = json.loads(json.dumps(found))
    if WRITES:
        place.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=False)
        place.write_text(text + "\n", encoding="utf-8")
        return
    differences = compared(json.loads(place.read_text(encoding="utf-8")), found)
    assert not differences, "\n".join(differences[:20])


def compared(recorded: Any, found: Any, where: str = "") -> list[str]:
    """Returns the places at which two JSON values differ, the order of keys among them."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        if list(recorded) != list(found):
            gone = [key for key in recorded if key not in found]
            new = [key for key in found if key not in recorded]
            what = f"without {gone}, with {new}" if gone or new else "in another order"
            return [f"{where}: {what}"]
        return [
            line
            for key in recorded
            for line in compared(recorded[key], found[key], f"{where}/{key}")
        ]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        return [
            line
            for index, pair in enumerate(zip(recorded, found, strict=True))
            for line in compared(*pair, f"{where}/{index}")
        ]
    return [] if recorded == found else [f"{where}: {recorded!r} was {found!r} now"]


MASKED = frozenset(
    {"created", "environment", "moexport", "sha256", "bytes", "peak_memory_bytes", "memory_bytes"}
)
"""Keys whose values are of a machine, a time or a version."""

OF_SIZES = re.compile(r"(hash of )?parity-\d+-tokens\.npz")
"""Records of sizes: a machine with more memory compares more of them."""

JUDGED = ("passed", "chosen_by", "choices", "samples", "ks")
BOUNDS = ("atol", "rtol", "routing", "tie", "coefficient", "outlier", "least_cosine")


def masked(value: Any, folders: tuple[Path, ...] = ()) -> Any:
    """Returns a JSON value without what is of one run or machine alone.

    `folders` become `…`; of a graph's parity the verdict and the bounds are left.
    """
    if isinstance(value, dict):
        return {
            key: "…"
            if key in MASKED
            else {name: inner[name] for name in (*JUDGED, *BOUNDS)}
            if key == "parity" and inner is not None
            else masked(inner, folders)
            for key, inner in value.items()
            if not OF_SIZES.fullmatch(key)
        }
    if isinstance(value, list | tuple):
        return [masked(inner, folders) for inner in value]
    if isinstance(value, str):
        return without(value, folders)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def without(text: str, folders: tuple[Path, ...]) -> str:
    """Returns a text in which folders, times and versions of this run are `…`."""
    for folder in folders:
        text = text.replace(str(folder), "…")
    text = text.replace(str(ROOT), "…")
    return text.replace(metadata.version("moexport"), "VERSION")
