"""Checks the engines of a bundle: that they are the files built, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import FeedError, ForeignEngineError, MissingExtraError, MoexportError, UsageError
from ..bundle.manifest import Check, Manifest
from ..parity import Parity, Reference, compare, recorded, settled
from .backends import backend_named, first_gpu
from .records import EngineRecord, engines_of

if TYPE_CHECKING:
    from .session import EngineSession


def engine_checks(
    directory: Path, manifest: Manifest, expected: Reference | None
) -> Iterator[Check]:
    """Yields a check for every engine: parity where it can run here, else why it was not run."""
    for record in engines_of(manifest):
        why_not = _why_not_run(manifest, record, expected)
        if why_not is not None:
            built = f"the file that {backend_named(record.flavour).title} {record.version} built"
            yield Check(f"engine {record.file}", True, f"{built}; not run: {why_not}")
            continue
        if expected is None:
            continue
        name = f"parity of {record.file}"
        try:
            parity = engine_parity(directory, manifest, record, expected)
        except (ForeignEngineError, MissingExtraError) as error:
            yield Check(name, True, f"not run: {error.message}")
        except MoexportError as error:
            yield Check(name, False, error.message)
        else:
            yield Check(name, parity.passed, _described(parity, len(expected.x)))


def _why_not_run(
    manifest: Manifest, record: EngineRecord, expected: Reference | None
) -> str | None:
    """Why an engine cannot be compared here, as far as that is known without loading it."""
    if expected is not None:
        try:
            _runs(manifest, record, expected)
        except (FeedError, UsageError) as error:
            return error.message
    return None if first_gpu() is not None else "there is no NVIDIA GPU here"


@dataclass(frozen=True, slots=True)
class _Runs:
    """What an engine is run with: the reference without ties, its batch size and k."""

    clear: Reference
    batch: int
    k: int | None


def _runs(manifest: Manifest, record: EngineRecord, expected: Reference) -> _Runs:
    """Raises `FeedError` or `UsageError` where the profiles do not contain the reference's inputs.

    An engine has no inner values to look at, so its routing is not compared, and inputs whose
    routing is a tie are left out.
    """
    clear = settled(expected, recorded(manifest.parity).tie)
    count, *rest = clear.x.shape
    batch = min(record.ranges[0].max[0], count)
    k = next(iter(clear.kept.values())) if manifest.k == "input" else None
    for size in (batch, count % batch or batch):
        record.check_fits((size, *rest), k)
    return _Runs(clear, batch, k)


def engine_parity(
    directory: Path, manifest: Manifest, record: EngineRecord, expected: Reference
) -> Parity:
    """Loads an engine and returns how far it is off; raises what loading and running raise."""
    from .session import EngineSession  # needs PyTorch, which a bundle without engines does not

    with EngineSession(directory / record.file) as session:
        return session_parity(session, manifest, record, expected)


def session_parity(
    session: EngineSession,
    manifest: Manifest,
    record: EngineRecord,
    expected: Reference,
    *,
    rtol: float | None = None,
) -> Parity:
    """Runs an engine on the reference's inputs, but for ties, and returns how far it is off.

    Raises `FeedError` where the profiles do not contain them.
    """
    runs, bounds = _runs(manifest, record, expected), recorded(manifest.parity)
    tolerance = bounds if rtol is None else replace(bounds, rtol=rtol)
    return compare(session, runs.clear, {}, batch=runs.batch, tolerance=tolerance, k=runs.k)


def _described(parity: Parity, given: int) -> str:
    left = f" of {given}" if parity.samples < given else ""
    return (
        f"max |difference| {parity.max_abs:.2g} ({parity.max_rel:.2g} of max|y|), cosine "
        f"{parity.cosine:.7f} in {parity.samples}{left} inputs; an engine does not show its routing"
    )
