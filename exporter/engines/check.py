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
from ..parity import Parity, Reference, compare, describe
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
            yield Check(name, parity.passed, describe(parity))


def engine_parity(
    directory: Path,
    manifest: Manifest,
    record: EngineRecord,
    expected: Reference,
    *,
    rtol: float | None = None,
) -> Parity:
    """Runs an engine on the reference's inputs and returns how far it is off.

    An engine has no inner values to look at, so its routing is not compared. Raises `FeedError`
    where the profiles do not contain those inputs, and what loading raises.
    """
    bounds = recorded(manifest.parity)
    with EngineSession(directory / record.file) as session:
        return compare(
            session,
            expected,
            {},
            batch=min(record.ranges[0].max[0], len(expected.x)),
            tolerance=bounds if rtol is None else replace(bounds, rtol=rtol),
            k=next(iter(expected.kept.values())) if session.takes_k else None,
        )
