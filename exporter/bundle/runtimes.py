"""The door for what runs graphs: ONNX Runtime is the core's own, others are plugins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...common.registry import Registry
from ...graphs.targets import TARGETS, Precision, Target, TargetRecord, runtime_of
from ..session import Session, SessionOptions, check_provider
from .manifest import Manifest


def _onnxruntime_options(
    record: TargetRecord, threads: int | None, spin_ms: float | None
) -> SessionOptions:
    assert record.provider is not None, "graphs of this target run as engines"
    return SessionOptions(provider=record.provider, threads=threads, spin_ms=spin_ms)


def _has_provider(record: TargetRecord) -> None:
    if record.provider is not None:  # of engines another check tells
        check_provider(record.provider)


@dataclass(frozen=True, slots=True)
class RuntimeRecord:
    """One runtime: `title` is what readers know it by.

    `open` opens a graph: that is all of a runtime that no target names, and that users name.
    `options` says how a target's graphs run, with so many threads that spin for so many ms.
    `check_runs` raises a `MoexportError` where this machine does not run a target's graphs,
    `check_computes` where it does not compute a precision for a target, so that nothing can be
    compared, and `check_graphs` where a bundle holds no graphs of this runtime.
    `state` says what is installed, or raises `MissingExtraError`. `advice` returns a line where
    this runtime is predicted to be faster than that of a target, for a precision and so many bytes
    of weights.
    """

    name: str
    title: str
    open: Callable[[Path | str, SessionOptions | None], Session]
    options: Callable[[TargetRecord, int | None, float | None], SessionOptions] = lambda *_: (
        SessionOptions()
    )
    check_runs: Callable[[TargetRecord], None] = lambda *_: None
    state: Callable[[], str] = lambda: ""
    check_computes: Callable[[Precision, Target], None] = lambda *_: None
    check_graphs: Callable[[Manifest, Path], None] = lambda *_: None
    advice: Callable[[str, str, int], str | None] = lambda *_: None


RUNTIMES = Registry(
    "moexport.runtimes",
    RuntimeRecord,
    (RuntimeRecord("onnxruntime", "ONNX Runtime", Session, _onnxruntime_options, _has_provider),),
)


def opened(path: Path | str, options: SessionOptions | None = None) -> Session:
    """Returns a graph, opened in the runtime that the options name."""
    runtime = "onnxruntime" if options is None else options.runtime
    return RUNTIMES[runtime].open(path, options)


def options_for(
    target: Target, threads: int | None = None, spin_ms: float | None = None
) -> SessionOptions:
    """Returns how a target's graphs run on this machine: in its own runtime."""
    return RUNTIMES[runtime_of(target)].options(TARGETS[target], threads, spin_ms)


def check_runs(target: Target) -> None:
    """Raises `MissingExtraError`, `UsageError` or `EngineError` where its graphs do not run here.

    Of engines another check tells.
    """
    RUNTIMES[runtime_of(target)].check_runs(TARGETS[target])


def check_computes(precision: Precision, target: Target) -> None:
    """Raises a `MoexportError` where a target's runtime here does not compute in a precision."""
    RUNTIMES[runtime_of(target)].check_computes(precision, target)
