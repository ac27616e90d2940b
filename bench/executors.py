"""The door for what shares work out to other machines, where options of a plugin ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.option import Request
from ..common.registry import Registry

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..exporter.requests import AnyPath, CalibrateRequest
    from .request import BenchRequest
    from .results import Results


@dataclass(frozen=True, slots=True)
class Executor:
    """Nodes that calibrate, measure and evaluate.

    `asked` returns whether a request's options ask for them (`Request.asked`); it raises
    `UsageError` for some that cannot be meant. `calibrate` and `bench` do what the calls of their
    names do, of models and data by path. `earlier` reads the results in a folder that `bench`
    wrote, by kind of node; `shown` is their table; `compared` returns what changed since then, and
    an error where a row is slower by a share. `evaluating` yields what evaluates the graphs of a
    search.
    """

    name: str
    asked: Callable[[Request], bool]
    calibrate: Callable[[object, object, CalibrateRequest], CalibrationTable]
    bench: Callable[[Sequence[AnyPath], BenchRequest], dict[str, Results]]
    earlier: Callable[..., Mapping[str, Results]]
    shown: Callable[[Mapping[str, Results], Path, BenchRequest], str]
    compared: Callable[
        [Mapping[str, Results], Mapping[str, Results], float | None],
        tuple[list[str], Exception | None],
    ]
    evaluating: Callable[[Request], AbstractContextManager[Any]]


EXECUTORS = Registry("moexport.executors", Executor)
"""All are plugins'."""


def executor_of(request: Request) -> Executor | None:
    """Returns what the options of a request ask for; None runs it on this machine."""
    if not request.further:
        return None
    return next((each for each in EXECUTORS if each.asked(request)), None)
