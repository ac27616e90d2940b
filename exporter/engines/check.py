"""Checks the engines of a bundle: that they are the files built, and what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import (
    FeedError,
    ForeignEngineError,
    MissingExtraError,
    MoexportError,
    UsageError,
)
from ..manifest import Manifest
from ..parity import Parity, Reference, compare, settled
from ..tolerance import recorded
from .additions import engines_of
from .device import first_gpu
from .flavours import flavour
from .record import EngineRecord
from .session import EngineSession

if TYPE_CHECKING:
    from ..bundle import Check


def engine_checks(
    directory: Path, manifest: Manifest, expected: Reference | None
) -> Iterator[Check]:
    """Yields a check for every engine: parity where there is a GPU, else that it was not run."""
    from ..bundle import Check

    for record in engines_of(manifest):
        title = f"{flavour(record.flavour).title} {record.version}"
        if first_gpu() is None:
            yield Check(
                f"engine {record.file}",
                True,
                f"the file that {title} built; not run: there is no NVIDIA GPU here",
            )
            continue
        if expected is None:
            continue
        name = f"parity of {record.file}"
        try:
            parity = engine_parity(directory, manifest, record, expected)
        except (FeedError, UsageError, ForeignEngineError, MissingExtraError) as error:
            yield Check(name, True, f"not run: {error.message}")
        except MoexportError as error:
            yield Check(name, False, error.message)
        else:
            yield Check(name, parity.passed, _described(parity, len(expected.x)))


def engine_parity(
    directory: Path, manifest: Manifest, record: EngineRecord, expected: Reference
) -> Parity:
    """Loads an engine and returns how far it is off; raises what loading and running raise."""
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
    """Runs an engine on the reference's inputs and returns how far it is off.

    An engine has no inner values to look at, so its routing is not compared, and inputs whose
    routing is a tie are left out. Raises `FeedError` where the profiles do not contain the others.
    """
    bounds = recorded(manifest.parity)
    clear = settled(expected, bounds.tie)
    return compare(
        session,
        clear,
        {},
        batch=min(record.ranges[0].max[0], len(clear.x)),
        tolerance=bounds if rtol is None else replace(bounds, rtol=rtol),
        k=next(iter(clear.kept.values())) if session.takes_k else None,
    )


def _described(parity: Parity, given: int) -> str:
    left = f" of {given}" if parity.samples < given else ""
    return (
        f"max |difference| {parity.max_abs:.2g} ({parity.max_rel:.2g} of max|y|), cosine "
        f"{parity.cosine:.7f} in {parity.samples}{left} inputs; an engine does not show its routing"
    )
