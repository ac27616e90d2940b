"""The Python calls: `load`, `export` and `bench`, with the command line's words."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from .calibration.feeds import Feed
from .exporter.bundle import Bundle
from .exporter.export import export as export_bundle
from .exporter.load import load
from .exporter.model import Model
from .exporter.options import (
    DEFAULT_BATCH,
    DEFAULT_TOKENS,
    ExportOptions,
    parse_k,
    parse_lowerings,
    parse_range,
)
from .graphs.lowerings.base import Target

__all__ = ["bench", "export", "load"]


def export(
    model: Model,
    destination: str | Path,
    *,
    k: int | float | str | Sequence[int] = "n",
    target: Target = "onnx",
    lowering: str = "auto",
    batch: str | int = str(DEFAULT_BATCH),
    tokens: str | int = str(DEFAULT_TOKENS),
    opset: int = 20,
    renormalize: bool = False,
    atol: float = 1e-6,
    rtol: float = 1e-4,
    data: Feed | None = None,
    verify: bool = True,
    force: bool = False,
) -> Bundle:
    """Writes a verified bundle of a loaded model and returns it.

    The arguments are the options of `moexport export`. Raises `UsageError` for one that cannot be
    meant, and whatever `exporter.export.export` raises.
    """
    options = ExportOptions(
        k=parse_k(_k_text(k)),
        target=target,
        lowerings=parse_lowerings(lowering),
        batch=parse_range(str(batch), "batch"),
        tokens=parse_range(str(tokens), "tokens"),
        opset=opset,
        renormalize=renormalize,
        atol=atol,
        rtol=rtol,
        verify=verify,
    )
    return export_bundle(model, Path(destination), options, data=data, force=force)


def _k_text(k: int | float | str | Sequence[int]) -> str:
    if isinstance(k, float):
        return f"{Fraction(k).limit_denominator(1 << 20)}" if not k.is_integer() else f"{k}"
    if isinstance(k, int | str):
        return str(k)
    return ",".join(str(each) for each in k)
