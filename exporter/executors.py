"""The registry of plugins that distribute work to other machines if their options request it."""

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
    from .requests import AnyPath, CalibrateRequest


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs calibrations, benchmarks and evaluations on other machines.

    `selects` returns whether a request's options select other machines (`Request.asked`); it raises
    `UsageError` for contradictory options. `calibrate` and `bench` do the same as the functions of
    those names, with models and data given by path; the request and results of `bench` are those of
    the core's. `read_earlier` reads the results in a folder that `bench` wrote, by kind of node;
    `as_table` formats them as a table; `compare` returns what changed since then, and an error if a
    row is slower by more than the given share. `evaluator` opens an evaluator for a search's
    graphs.
    """

    name: str
    selects: Callable[[Request], bool]
    calibrate: Callable[[object, object, CalibrateRequest], CalibrationTable]
    bench: Callable[[Sequence[AnyPath], Any], dict[str, Any]]
    read_earlier: Callable[..., Mapping[str, Any]]
    as_table: Callable[[Mapping[str, Any], Path, Any], str]
    compare: Callable[
        [Mapping[str, Any], Mapping[str, Any], float | None], tuple[list[str], Exception | None]
    ]
    evaluator: Callable[[Request], AbstractContextManager[Any]]


EXECUTORS = Registry("moexport.executors", Executor)
"""All executors come from plugins."""


def executor_of(request: Request) -> Executor | None:
    """Returns the executor that a request's options select; None for this machine."""
    if not request.further:
        return None
    return next((each for each in EXECUTORS if each.selects(request)), None)
