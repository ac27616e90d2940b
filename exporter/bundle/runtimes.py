"""The registry of runtimes: ONNX Runtime is the core's own, others come from plugins.

TensorRT runs engines, compiled from graphs; it is imported only for engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.option import declared, panels_for
from ...common.registry import Registry, left_out
from ...common.text import near_miss
from ...errors import UsageError
from ...graphs.targets import TARGETS, Precision, Target, TargetRecord, runtime_of
from ..session import CPU, OWN_OPTIONS, Session, SessionOptions, check_provider
from .manifest import Manifest


def _onnxruntime_options(
    record: TargetRecord, threads: int | None, spin_ms: float | None
) -> SessionOptions:
    assert record.provider is not None, "this target runs engines instead of graphs"
    return SessionOptions(provider=record.provider, threads=threads, spin_ms=spin_ms)


@dataclass(frozen=True, slots=True)
class RuntimeRecord:
    """One runtime: `title` is its name in texts; the `extra` of pyproject.toml installs it.

    `open` opens a graph: a runtime that no target uses needs nothing else. `takes` are the optional
    session options that it accepts (`session.OWN_OPTIONS`, and those of plugins' panels for
    `run`). `options` returns the session options for a target's graphs, given the number of threads
    and the ms for which they spin. `check_runs` raises a `MoexportError` if this machine cannot run
    a target's graphs, `check_computes` if it cannot compute a precision for a target, so that
    nothing can be compared, and `check_graphs` if a bundle has no graphs for this runtime. `state`
    describes the installation, or raises `MissingExtraError`. `advice` returns a line if this
    runtime is predicted to be faster than that of a target, for a precision and a size of weights.
    `product_types` are the 16-bit floats in which it computes products on a CPU, instead of FP32.
    `program` returns Python code that runs one of its files on feeds in braces and returns an
    output, without moexport.
    """

    name: str
    title: str
    open: Callable[[Path | str, SessionOptions | None], Session]
    takes: tuple[str, ...] = ()
    extra: str | None = None
    options: Callable[[TargetRecord, int | None, float | None], SessionOptions] = (
        lambda record, threads, _: SessionOptions(runtime=record.runtime, threads=threads)
    )
    check_runs: Callable[[TargetRecord], None] = lambda *_: None
    state: Callable[[], str] = lambda: ""
    check_computes: Callable[[Precision, Target], None] = lambda *_: None
    check_graphs: Callable[[Manifest, Path], None] = lambda *_: None
    advice: Callable[[str, str, int], str | None] = lambda *_: None
    product_types: tuple[Precision, ...] = ()
    program: Callable[[str, str, str], str] | None = None


RUNTIMES = Registry(
    "moexport.runtimes",
    RuntimeRecord,
    (
        RuntimeRecord(
            name="onnxruntime",
            title="ONNX Runtime",
            open=Session,
            takes=("provider", "profile", "cuda_graphs"),
            options=_onnxruntime_options,
            check_runs=lambda record: check_provider(record.provider or CPU),
        ),
    ),
)


def owner_of(option: str) -> tuple[str, str]:
    """Returns the name and the title of the runtime that accepts an option of a session."""
    owners = ((each.name, each.title) for each in RUNTIMES if option in each.takes)
    return next(owners, ("", "another runtime"))


def of_plugins() -> dict[str, Any]:
    """Returns the session options of plugins, with their defaults."""
    return {
        name: field.default
        for panel in panels_for(("run",), ())
        for name, (field, _) in declared(panel.options).items()
    }


def check_options(options: SessionOptions) -> None:
    """Raises `UsageError` for an option that the named runtime does not accept."""
    defaults = {name: getattr(SessionOptions(), name) for name in OWN_OPTIONS}
    defaults |= of_plugins() if options.of_plugins else {}  # loads the plugins
    values = {name: getattr(options, name) for name in OWN_OPTIONS} | {**options.of_plugins}
    for name, value in values.items():
        is_default = name in defaults and value == defaults[name]
        if is_default or name in RUNTIMES[options.runtime].takes:
            continue
        runtime, title = owner_of(name)
        if not runtime and name in options.of_plugins:
            known = (*OWN_OPTIONS, "threads", *(each for r in RUNTIMES for each in r.takes))
            hint = near_miss(name, dict.fromkeys(known)) + left_out()
            raise UsageError(f"{name}: no runtime has such an option", hint=hint)
        raise UsageError(
            f"{name}={value!r} is an option of {title}",
            hint=f"leave {name} out" + (f", or give runtime='{runtime}'" if runtime else ""),
        )


def open_graph(path: Path | str, options: SessionOptions | None = None) -> Session:
    """Returns a graph, opened in the runtime that the options name.

    Raises `UsageError` for an option that it does not accept, and the errors of opening the graph.
    """
    options = options or SessionOptions()
    check_options(options)
    return RUNTIMES[options.runtime].open(path, options)


def options_for(
    target: Target, threads: int | None = None, spin_ms: float | None = None
) -> SessionOptions:
    """Returns the session options for a target's graphs on this machine, in its own runtime."""
    return RUNTIMES[runtime_of(target)].options(TARGETS[target], threads, spin_ms)


def check_runs(target: Target) -> None:
    """Raises a `MoexportError` if a target's graphs cannot run here."""
    RUNTIMES[runtime_of(target)].check_runs(TARGETS[target])


def check_computes(precision: Precision, target: Target) -> None:
    """Raises a `MoexportError` if a target's runtime here cannot compute in a precision."""
    RUNTIMES[runtime_of(target)].check_computes(precision, target)
