"""`bench --fail-if-slower`: earlier results as a bar that later ones must not fall below."""

from __future__ import annotations

from pathlib import Path

from ...errors import MoexportError, UsageError
from ..results import Results, read
from .compare import compare


def parse_share(text: str) -> float:
    """Returns 0.05 for `5%` or `0.05`; UsageError for what is no share."""
    value = text.strip()
    try:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 10:
        raise UsageError(
            f"--fail-if-slower {text}: not a share",
            hint="--fail-if-slower 5% allows a row to take 5% longer than before",
        )
    return share


def earlier(out: Path, named: Path | None, *, wanted: bool) -> Results | None:
    """Returns the results to compare with: those that are named, else those that `out` holds."""
    if named is not None:
        return read(named)
    own = out / "results.json"
    return read(own) if wanted and own.is_file() else None


def fail_if(before: Results, now: Results, share: float | None) -> tuple[str, ...]:
    """Returns what changed, in lines; raises MoexportError where rows are slower than allowed.

    A row is slower when it is so by more than `share` and by more than the spread of its rounds. A
    row that fails and did not before counts too.
    """
    comparison = compare(before, now)
    lines = (comparison.sentence, *(c.label for c in comparison.told), *comparison.notes)
    worse = () if share is None else comparison.failures(share)
    if share is not None and not comparison.changes:
        raise MoexportError(
            "--fail-if-slower: the earlier results have no row in common with these",
            hint="compare runs of the same models, engines, k and batch sizes",
        )
    if worse:
        listed = "; ".join(change.label for change in worse[:5])
        more = f"; and {len(worse) - 5} more" if len(worse) > 5 else ""
        raise MoexportError(
            f"{len(worse)} of {len(comparison.changes)} rows are slower by more than {share:.0%} "
            f"or fail: {listed}{more}",
            hint="a noisy machine? see the spreads in the report, or allow more",
        )
    return lines
