"""The door for what shares work out to other machines: `--ray` asks for the one called `ray`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.registry import Registry

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..exporter.requests import AnyPath, CalibrateRequest
    from .request import BenchRequest
    from .results import Results


@dataclass(frozen=True, slots=True)
class Executor:
    """Nodes that calibrate, measure and evaluate.

    `calibrate` and `bench` do what the calls of their names do, of models and data by path.
    `earlier` reads the results in a folder that `bench` wrote, by kind of node; `shown` is their
    table, with what changed since then and an error where a row is slower by a share.
    `evaluating` yields what evaluates the graphs of a search: address, resource, progress.
    """

    name: str
    calibrate: Callable[[object, object, CalibrateRequest], CalibrationTable]
    bench: Callable[[Sequence[AnyPath], BenchRequest], dict[str, Results]]
    earlier: Callable[..., Mapping[str, Results]]
    shown: Callable[[Mapping[str, Results], Path, Sequence[str]], str]
    compared: Callable[
        [Mapping[str, Results], Mapping[str, Results], float | None],
        tuple[list[str], Exception | None],
    ]
    evaluating: Callable[..., AbstractContextManager[Any]]


EXECUTORS = Registry("moexport.executors", Executor)
"""All are plugins'."""

RAY = "ray"
