"""The Python function for model repositories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...common.option import takes
from ...exporter.bundle.bundle import Bundle
from ...exporter.requests import AnyPath
from .repository import ServedModel
from .request import TritonRequest


@takes(TritonRequest)
def triton(
    bundles: Bundle | AnyPath | Sequence[Bundle | AnyPath], out: AnyPath, request: TritonRequest
) -> list[ServedModel]:
    """Writes bundles to a model repository for Triton Inference Server; returns the models.

    Bundles of one network with different k become one model each, plus an ensemble of all. `out` is
    the repository: a new folder, or one that contains other models or versions.

    Raises:
        UsageError: the options do not fit a bundle.
        BundleError: a bundle's files have changed.
        OutputError: the repository already has that version.
    """
    from ...exporter.bundle.bundle import Bundle
    from .repository import write_repository

    listed = [bundles] if isinstance(bundles, Bundle | str | Path) else bundles
    opened = [Bundle.open(each.path if isinstance(each, Bundle) else each) for each in listed]
    return write_repository(opened, Path(out), request)
