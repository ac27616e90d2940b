"""Compares the engines of a bundle with the recorded results of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ...errors import (
    FeedError,
    ForeignEngineError,
    MissingExtraError,
    MoexportError,
    UntrustedEngineError,
    UsageError,
)
from ..bundle.manifest import Check, Manifest
from ..bundle.parity import (
    Parity,
    Reference,
    Tolerance,
    compare,
    describe,
    differences,
    stored_bounds,
    worst_parity,
)
from .backends import backend_named, first_gpu
from .records import EngineRecord, engines_of
from .session import EngineSession


def checks(
    directory: Path,
    manifest: Manifest,
    expected: Reference | None,
    bounds: Callable[..., Tolerance],
    *,
    trust: bool,
) -> Iterator[Check]:
    """Yields the parity of a bundle's engines, or why they were not run.

    `bounds` returns the bounds for an engine with or without TF32. Engines that were built
    elsewhere run only with `trust`.
    """
    for record in engines_of(manifest):
        tolerance = bounds(tf32=bool(record.options.get("tf32")))
        why_not = None if first_gpu() is not None else "there is no NVIDIA GPU here"
        try:
            if expected is not None:
                _run_arguments(manifest, record, expected, tolerance.tie)
        except (FeedError, UsageError) as error:
            why_not = error.message
        if why_not is not None:
            builder = f"{backend_named(record.flavour).title} {record.version}"
            yield Check(f"engine {record.file}", True, f"built by {builder}; not run: {why_not}")
            continue
        if expected is None:
            continue
        name = f"parity of {record.file}"
        try:
            with EngineSession(directory / record.file, trust=trust) as session:
                parity = engine_parity(session, manifest, record, expected, tolerance)
                exposed = _exposed(session, manifest, record)
        except (ForeignEngineError, MissingExtraError, UntrustedEngineError) as error:
            yield Check(name, True, f"not run: {error.message}")
        except MoexportError as error:
            yield Check(name, False, error.message)
        else:
            total = f" of {len(expected.x)}" if parity.samples < len(expected.x) else ""
            suffix = f"in {parity.samples}{total} inputs; built without --expose-routing"
            detail = differences(parity.max_abs, parity.max_rel, parity.cosine)
            yield Check(name, parity.passed, describe(parity) if exposed else f"{detail} {suffix}")


def engine_parity(
    session: EngineSession,
    manifest: Manifest,
    record: EngineRecord,
    expected: Reference,
    tolerance: Tolerance | None = None,
) -> Parity:
    """Runs an engine on the reference's inputs, and returns how far its outputs are off.

    The layers' choices are compared if the engine was built with `--expose-routing`; otherwise,
    inputs with a tie are left out. Raises `FeedError` or `UsageError` if the profiles do not
    contain the inputs or k.
    """
    bounds = tolerance or stored_bounds(manifest.parity, manifest.precision)
    exposed = _exposed(session, manifest, record)

    def compared(reference: Reference) -> Parity:
        clear, batch, k = _run_arguments(manifest, record, reference, bounds.tie)
        inputs = reference if exposed else clear
        return compare(session, inputs, exposed, batch=batch, tolerance=bounds, k=k)

    if manifest.k != "input":
        return compared(expected)
    parities = {}
    for k, reference in {expected.main_k: expected, **expected.at_other_k}.items():
        try:
            parities[k] = compared(reference)
        except (FeedError, UsageError):  # no profile contains this k, or all inputs have ties
            if reference is expected:
                raise
    return worst_parity(parities)


def _exposed(session: EngineSession, manifest: Manifest, record: EngineRecord) -> dict[str, str]:
    """Returns the engine's outputs that are choices of its layers, by the name of the choice."""
    graph = next((entry for entry in manifest.graphs if entry.file == record.graph), None)
    named = {} if graph is None else graph.selected
    return {choice: value for choice, value in named.items() if value in session.output_names}


def _run_arguments(
    manifest: Manifest, record: EngineRecord, expected: Reference, tie: float
) -> tuple[Reference, int, int | None]:
    """Returns the arguments of an engine's run: the reference without ties, batch size and k."""
    clear = without_ties(expected, tie)
    count, *rest = clear.x.shape
    batch = min(record.ranges[0].max[0], count)
    k = clear.main_k if manifest.k == "input" else None
    for size in (batch, count % batch or batch):
        record.check_fits((size, *rest), k)
    return clear, batch, k


def without_ties(expected: Reference, tie: float) -> Reference:
    """Returns the reference without the samples in which any choice is a tie.

    Runtimes that do not report choices need this, because either choice in a tie is correct. Raises
    `FeedError` if no sample is left.
    """
    clear = np.ones(len(expected.x), dtype=bool)
    for margin in expected.margin.values():
        clear &= (margin.reshape(len(clear), -1) > tie).all(axis=1)
    if not clear.any():
        raise FeedError(
            "for every reference input, rounding may change the choice of some experts",
            hint="export again with different or more --data",
        )
    return expected.rows(clear)
