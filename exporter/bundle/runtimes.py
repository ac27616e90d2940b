"""The door for what runs graphs: ONNX Runtime is the core's own, others are plugins.

TensorRT runs engines, which are compiled of graphs: it is imported where one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.registry import Registry, left_out
from ...common.text import near_miss
from ...errors import UsageError
from ...graphs.targets import TARGETS, Precision, Target, TargetRecord, runtime_of
from ..session import OWN_OPTIONS, Session, SessionOptions, check_provider
from .manifest import Check, Manifest

if TYPE_CHECKING:
    from ...common.console import Progress
    from ..tensorrt.options import EngineOptions
    from .parity_record import Reference, Tolerance


def _onnxruntime_options(
    record: TargetRecord, threads: int | None, spin_ms: float | None
) -> SessionOptions:
    assert record.provider is not None, "graphs of this target run as engines"
    return SessionOptions(provider=record.provider, threads=threads, spin_ms=spin_ms)


def _options(record: TargetRecord, threads: int | None, spin_ms: float | None) -> SessionOptions:
    del spin_ms
    return SessionOptions(runtime=record.runtime, threads=threads)


def _has_provider(record: TargetRecord) -> None:
    if record.provider is not None:  # of engines another check tells
        check_provider(record.provider)


@dataclass(frozen=True, slots=True)
class RuntimeRecord:
    """One runtime: `title` is what readers know it by, and `extra` of pyproject.toml installs it.

    `open` opens a graph: that is all of a runtime that no target names, and that users name. Of the
    session options that only some runtimes have (`session.OWN_OPTIONS`, and what panels of plugins
    add to `run`) it `takes` those.
    `options` says how a target's graphs run, with so many threads that spin for so many ms.
    `check_runs` raises a `MoexportError` where this machine does not run a target's graphs,
    `check_computes` where it does not compute a precision for a target, so that nothing can be
    compared, and `check_graphs` where a bundle holds no graphs of this runtime.
    `state` says what is installed, or raises `MissingExtraError`. `advice` returns a line where
    this runtime is predicted to be faster than that of a target, for a precision and so many bytes
    of weights. `short_products` are the 16-bit floats whose products it computes in them on a CPU,
    not in FP32. `program` returns the lines of Python that run a file of its own on feeds in braces
    and give an output, without moexport.
    """

    name: str
    title: str
    open: Callable[[Path | str, SessionOptions | None], Session]
    takes: tuple[str, ...] = ()
    extra: str | None = None
    options: Callable[[TargetRecord, int | None, float | None], SessionOptions] = _options
    check_runs: Callable[[TargetRecord], None] = lambda *_: None
    state: Callable[[], str] = lambda: ""
    check_computes: Callable[[Precision, Target], None] = lambda *_: None
    check_graphs: Callable[[Manifest, Path], None] = lambda *_: None
    advice: Callable[[str, str, int], str | None] = lambda *_: None
    short_products: tuple[Precision, ...] = ()
    program: Callable[[str, str, str], str] | None = None


RUNTIMES = Registry(
    "moexport.runtimes",
    RuntimeRecord,
    (
        RuntimeRecord(
            name="onnxruntime",
            title="ONNX Runtime",
            open=Session,
            takes=("provider", "profile"),
            options=_onnxruntime_options,
            check_runs=_has_provider,
        ),
    ),
)


def owner_of(option: str) -> tuple[str, str]:
    """Returns the name and the title of the runtime that takes an option of a session."""
    owners = ((each.name, each.title) for each in RUNTIMES if option in each.takes)
    return next(owners, ("", "another runtime"))


def check_options(options: SessionOptions) -> None:
    """Raises `UsageError` for an option that the runtime which the options name does not take."""
    usual = SessionOptions()
    stated = {name: getattr(options, name) for name in OWN_OPTIONS}
    stated = {name: value for name, value in stated.items() if value != getattr(usual, name)}
    for name, value in (stated | {**options.of_plugins}).items():
        if name in RUNTIMES[options.runtime].takes:
            continue
        runtime, title = owner_of(name)
        if not runtime and name in options.of_plugins:
            known = (*OWN_OPTIONS, "threads", *(each for of in RUNTIMES for each in of.takes))
            hint = near_miss(name, dict.fromkeys(known)) + left_out()
            raise UsageError(f"{name}: no runtime takes such an option", hint=hint)
        raise UsageError(
            f"{name}={value!r}: it is {title}'s",
            hint=f"leave {name} out" + (f", or give runtime='{runtime}'" if runtime else ""),
        )


def opened(path: Path | str, options: SessionOptions | None = None) -> Session:
    """Returns a graph, opened in the runtime that the options name.

    Raises `UsageError` for an option that it does not take, and what opening the graph raises.
    """
    options = options or SessionOptions()
    check_options(options)
    return RUNTIMES[options.runtime].open(path, options)


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


def check_engine(target: Target, engine: EngineOptions | bool | None) -> None:
    """Raises, before an export begins, what keeps an engine that is asked for from being built.

    Where none was asked for, nothing is raised: `with_engines` says what is missing.
    """
    if engine is None or engine is False:
        return
    from ..tensorrt.engines import check_for_export

    check_for_export(target, engine)


def with_engines(
    directory: Path, manifest: Manifest, engine: EngineOptions | bool | None, progress: Progress
) -> Manifest:
    """Returns a new bundle's manifest with the engines of its target, built into its folder."""
    if not TARGETS[manifest.target].compiled or engine is False:
        return manifest
    from ..tensorrt.engines import build_for_export

    return build_for_export(directory, manifest, engine, progress)


def engine_checks(
    directory: Path,
    manifest: Manifest,
    expected: Reference | None,
    bounds: Callable[[bool], Tolerance],
    *,
    trust: bool,
) -> Iterator[Check]:
    """Yields the checks of a bundle's engines, which run with the inputs of a reference.

    `bounds` are those for an engine that computes in TF32, or not. Engines that were built
    elsewhere are run with `trust` alone.
    """
    if not manifest.engines:
        return
    from ..tensorrt.verify import checks

    yield from checks(directory, manifest, expected, bounds, trust=trust)
