"""Two results files side by side: what changed beyond the spread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...common.latency import differs
from ...common.text import parse_share
from ...errors import CheckError, MoexportError, UsageError
from ..results import Results, Row, read
from .summary import line_name, milliseconds


@dataclass(frozen=True, slots=True)
class Change:
    """A row in the earlier results and in the new ones."""

    before: Row
    now: Row

    @property
    def ratio(self) -> float | None:
        """The new latency divided by the old: above 1 is slower. None if one of the rows failed."""
        old, new = self.before.median_ms, self.now.median_ms
        return None if old is None or new is None else new / old

    @property
    def beyond_spread(self) -> bool:
        """Whether the latencies differ by more than the spread of either row's rounds."""
        old, new = self.before.latency_ms, self.now.latency_ms
        return old is not None and new is not None and differs(old, new)

    @property
    def quality_changed(self) -> bool:
        """Whether the kept shares' 95% intervals do not overlap or, if none, the values differ."""
        old, new = self.before.kept_interval, self.now.kept_interval
        if old is None or new is None:
            return self.before.kept != self.now.kept
        return old.high < new.low or new.high < old.low

    def slower_than(self, share: float) -> bool:
        """Returns whether it is slower by more than the spread and the fraction `share`."""
        return self.beyond_spread and self.ratio is not None and self.ratio > 1 + share

    @property
    def broken(self) -> bool:
        """Whether the row fails now but did not before."""
        return self.now.error is not None and self.before.error is None

    @property
    def label(self) -> str:
        """The row and its change in words: `digits, batch 1: ONNX Runtime, grouped, k = 4: …`."""
        row, old, new = self.now, self.before.median_ms, self.now.median_ms
        name = f"{row.model}, {row.sizes}: {line_name(row)}, k = {row.k}"
        if old is None or new is None:
            return f"{name}: {row.error or 'no latency'}"
        return f"{name}: {milliseconds(old)} → {milliseconds(new)} ms ({new / old - 1:+.0%})"


@dataclass(frozen=True, slots=True)
class ResultsComparison:
    """The rows that two files share, and notes on what limits the comparison."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def slower(self) -> tuple[Change, ...]:
        """Rows that are slower by more than the spread."""
        return tuple(c for c in self.changes if c.slower_than(0.0))

    @property
    def faster(self) -> tuple[Change, ...]:
        """Rows that are faster by more than the spread."""
        return tuple(c for c in self.changes if c.beyond_spread and (c.ratio or 1.0) < 1)

    @property
    def notable(self) -> tuple[Change, ...]:
        """Rows worth reporting: a changed latency, a changed accuracy or a failure."""
        return tuple(c for c in self.changes if c.beyond_spread or c.quality_changed or c.broken)

    @property
    def sentence(self) -> str:
        """A summary of the changes, in one sentence."""
        same = len(self.changes) - len(self.slower) - len(self.faster)
        return (
            f"Of {len(self.changes)} rows in both files, {len(self.faster)} are faster and "
            f"{len(self.slower)} slower by more than the spread; {same} show no difference."
        )

    def failures(self, share: float) -> tuple[Change, ...]:
        """Returns rows that are slower than `share` allows, or that fail but did not before."""
        return tuple(c for c in self.changes if c.broken or c.slower_than(share))


def compare(before: Results, now: Results) -> ResultsComparison:
    """Pairs the rows of two files by what they measure, with notes on what else differs."""
    old = {row.identity: row for row in before.rows}
    new = {row.identity: row for row in now.rows}
    shared = [key for key in new if key in old]
    changes = tuple(Change(old[key], new[key]) for key in shared)
    only_before, only_now = len(old) - len(shared), len(new) - len(shared)
    notes = []
    for name in ("cpu", "gpu", "threads", "memory_bytes"):
        prior, current = (run.environment.get(name) for run in (before, now))
        if isinstance(prior, dict) and isinstance(current, dict):  # earlier files have fewer facts
            current = {key: current[key] for key in current if key in prior}
        if prior != current:
            notes.append(f"Different machine or setting: {name} was {prior} and is now {current}.")
    old_packages, new_packages = (run.environment.get("packages") or {} for run in (before, now))
    updates = [
        f"{name} {old_packages.get(name, 'none')} → {new_packages.get(name, 'none')}"
        for name in dict.fromkeys((*old_packages, *new_packages))
        if old_packages.get(name) != new_packages.get(name)
    ]
    if updates:
        notes.append(f"Different versions: {', '.join(updates)}.")
    for file, results in (("The earlier file", before), ("This file", now)):
        if results.disturbance:
            notes.append(f"{file}: {results.disturbance}")
    hashes = {model.name: model.sha256 for model in before.models}
    edited = [m.name for m in now.models if hashes.get(m.name, m.sha256) not in ("", m.sha256)]
    if edited:
        notes.append(f"Different weights: {', '.join(edited)}.")
    moved = sum(_host(change.before) != _host(change.now) for change in changes)
    if moved:
        notes.append(f"{moved} rows were timed on a different machine: compare ratios, not times.")
    if only_before or only_now:
        notes.append(
            f"{only_before} rows are only in the earlier file, {only_now} only in this one."
        )
    return ResultsComparison(changes, tuple(notes))


def _host(row: Row) -> str | None:
    """Returns the machine of a row, without the id that Ray gives its node at every start."""
    return None if row.node is None else row.node.rpartition("-")[0]


def parse_slower(text: str) -> float:
    """Parses a share, `5%` or `0.05`; raises UsageError for other text, or a share out of range."""
    share = parse_share(text, "--fail-if-slower")
    if not 0 <= share < 10:
        raise UsageError(
            f"--fail-if-slower {text}: must be at least 0% and below 1000%",
            hint="--fail-if-slower 5% allows a row to take 5% longer than before",
        )
    return share


def read_earlier(out: Path, named: Path | None, *, wanted: bool) -> Results | None:
    """Returns the results to compare with: the named file, or else the results in `out`."""
    if named is not None:
        return read(named)
    file = out / "results.json"
    return read(file) if wanted and file.is_file() else None


def check_regression(before: Results, now: Results, share: float | None) -> tuple[str, ...]:
    """Returns the changes as lines; raises CheckError if rows are slower than allowed.

    A row counts as slower if it is slower by more than `share` and by more than the spread of its
    rounds. A row that fails but did not before also counts.
    """
    comparison = compare(before, now)
    lines = (comparison.sentence, *(c.label for c in comparison.notable), *comparison.notes)
    worse = () if share is None else comparison.failures(share)
    if share is not None and not comparison.changes:
        raise MoexportError(
            "--fail-if-slower: the earlier and the new results have no row in common",
            hint="compare runs of the same models, engines, k and batch sizes",
        )
    if worse:
        listed = "; ".join(change.label for change in worse[:5])
        more = f"; and {len(worse) - 5} more" if len(worse) > 5 else ""
        raise CheckError(
            f"{len(worse)} of {len(comparison.changes)} rows are slower by more than {share:.0%} "
            f"or fail: {listed}{more}",
            hint="see the spreads in the report; if the machine is noisy, allow a larger slowdown",
        )
    return lines
