"""What a results file says: its rows by model and batch, their lines over k, and the summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...common import timing
from ...common.timing import Latency
from ..engines import PYTORCH_EAGER, TITLES
from ..results import Interval, Results, Row

KEPT = 0.99  # the summary's bar: the share of the untouched model's accuracy that a row must keep
UNTOUCHED = "PyTorch, untouched"  # what tables and charts call the reference
GPU_MS = "GPU ms"  # the heading of the times by CUDA events, in every table that has them


@dataclass(frozen=True, slots=True)
class Series:
    """The rows of one engine, lowering, precision and provider at one batch size, by k.

    `look` numbers the lines of a results file: one colour and marker wherever a line appears.
    """

    name: str
    look: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """A value and how far its bar reaches; `cut` where it goes on outside of the chart."""

    value: float
    below: float
    above: float
    cut: bool = False

    @staticmethod
    def around(value: float, interval: Interval | None) -> ErrorBar:
        """Returns a value with its interval, or without a bar."""
        if interval is None:
            return ErrorBar(value, 0.0, 0.0)
        return ErrorBar(value, max(0.0, value - interval.low), max(0.0, interval.high - value))


@dataclass(frozen=True, slots=True)
class Section:
    """One model at one batch size: its lines over k and the untouched model beside them.

    Of a language model one phase, which `sizes` tells with the batch size.
    `reference` is the untouched model on the CPU, `gpu_reference` on the GPU: one of the lines.
    """

    model: str
    batch: int
    experts: int
    reference: Row | None
    series: tuple[Series, ...]
    gpu_reference: Row | None = None
    phase: str | None = None
    sizes: str = ""

    @property
    def full_k(self) -> int:
        """The k of the untouched model: all experts, or as many as its router was trained for."""
        return self.experts if self.reference is None else self.reference.k

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all lines."""
        return tuple(row for line in self.series for row in line.rows)

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows of all lines, and the untouched model."""
        return self.rows if self.reference is None else (*self.rows, self.reference)

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k that was measured, ascending."""
        return tuple(sorted({row.k for row in self.rows}))

    @property
    def quality(self) -> str | None:
        """What the models are judged by: `accuracy`, `perplexity`, or None without labels."""
        if any(row.accuracy is not None for row in self.all_rows):
            return "accuracy"
        return "perplexity" if any(row.perplexity is not None for row in self.all_rows) else None

    @property
    def top_ms(self) -> float:
        """Where the latency axis ends: above every median, and above every bar that is no outlier.

        One disturbed round would otherwise flatten all lines.
        """
        timed = [row.latency_ms for row in self.all_rows if row.latency_ms is not None]
        highest = max((each.median for each in timed), default=1.0)
        bars = max((max(each.rounds) for each in timed), default=1.0)
        return 1.06 * max(highest, min(bars, 1.5 * highest))

    def bar(self, latency: Latency) -> ErrorBar:
        """Returns a median with the range of its rounds, as far as the chart reaches."""
        # A median of all calls can lie outside the medians of its rounds by a hair.
        below = max(0.0, latency.median - min(latency.rounds))
        above = max(0.0, max(latency.rounds) - latency.median)
        room = self.top_ms - latency.median
        return ErrorBar(latency.median, below, min(above, room), cut=above > room)

    def base(self, row: Row) -> Row | None:
        """The untouched model that a row's speed is against: on a GPU the GPU's, if measured."""
        if row.on_gpu and self.gpu_reference is not None:
            return self.gpu_reference
        return self.reference

    def place(self, row: Row) -> str:
        """Where the base of a row ran, to end a sentence; empty where no row ran on a GPU."""
        base = self.base(row)
        if base is None or not any(each.on_gpu for each in self.rows):
            return ""
        return f" on the {'GPU' if base.on_gpu else 'CPU'}"

    def speedup(self, row: Row) -> float | None:
        """How many times faster than its base a row is, by medians of the wall clock."""
        base = self.base(row)
        if base is None or base.median_ms is None or row.median_ms is None:
            return None
        return base.median_ms / row.median_ms

    def faster_or_slower(self, row: Row) -> bool:
        """Whether a row's speed can be told from its base's."""
        base = self.base(row)
        if base is None or base.latency_ms is None or row.latency_ms is None:
            return False
        return timing.differs(row.latency_ms, base.latency_ms)


def engine_name(row: Row) -> str:
    """Returns the engine of a row without lowering and precision: `ONNX Runtime, cuda`."""
    return ", ".join(_words(row, ()))


def line_name(row: Row) -> str:
    """Returns what a reader calls the engine of a row: `ONNX Runtime, grouped, INT8`."""
    precision = "" if row.precision == "fp32" else row.precision.upper()
    return ", ".join(_words(row, (row.lowering, precision)))


def _words(row: Row, between: tuple[str | None, ...]) -> Iterator[str]:
    """The engine, what is said of the graph, and the provider, each where it tells something."""
    provider = None if row.provider in ("cpu", row.engine) else row.provider
    engine = TITLES.get(row.engine, row.engine)
    if row.computed_in is not None:
        engine += f" ({row.computed_in})"
    return (word for word in (engine, *between, provider) if word)


def row_name(row: Row) -> str:
    """Returns what tables call a row: its engine, or that it is the reference."""
    return UNTOUCHED if row.is_reference else line_name(row)


def short_name(row: Row) -> str:
    """Returns the name of a row's engine where there is little room: `grouped, INT8`."""
    return line_name(row).removeprefix("ONNX Runtime, ")


def sections(results: Results) -> tuple[Section, ...]:
    """Returns a section for each model, batch size and phase; rows that failed are in no line."""
    names = list(dict.fromkeys(line_name(r) for r in results.rows if not r.is_reference))
    found = []
    for model in dict.fromkeys(row.model for row in results.rows):
        rows = results.of_model(model)
        for batch, phase in sorted({(row.batch, row.phase or "") for row in rows}):
            both = [r for r in rows if (r.batch, r.phase or "") == (batch, phase)]
            here = [r for r in both if r.error is None]
            by_name: dict[str, list[Row]] = {}
            for row in sorted(here, key=lambda row: row.k):
                if not row.is_reference:
                    by_name.setdefault(line_name(row), []).append(row)
            on_gpu = (r for r in here if r.engine == PYTORCH_EAGER and r.on_gpu)
            found.append(
                Section(
                    model=model,
                    batch=batch,
                    experts=max(row.experts for row in rows),
                    reference=next((r for r in here if r.is_reference), None),
                    series=tuple(
                        Series(name, look, tuple(by_name[name]))
                        for look, name in enumerate(names)
                        if name in by_name
                    ),
                    gpu_reference=next(on_gpu, None),
                    phase=phase or None,
                    sizes=both[0].sizes,
                )
            )
    return tuple(found)


def headline(section: Section) -> Row | None:
    """Returns the row that a section's summary is about.

    The rule: the fastest row that keeps at least 99% of the untouched model's accuracy; where none
    does, the one that keeps most. Without labels, the fastest. Never the untouched model itself.
    """
    timed = [row for row in section.rows if row.latency_ms and row is not section.gpu_reference]
    kept = [row.kept for row in timed if row.kept is not None]
    if kept:
        bar = min(KEPT, max(kept))
        timed = [row for row in timed if row.kept is not None and row.kept >= bar]
    return min(timed, key=_median, default=None)


def summary(section: Section) -> str:
    """Returns one sentence: what to deploy, what it keeps, and its speed against PyTorch's."""
    row = headline(section)
    if row is None:
        return f"Nothing could be measured for {section.model} at {section.sizes}."
    told = claim(section, row)
    if row.kept is None:
        return f"Accuracy is not known: the inputs had no labels. Fastest: {told}."
    if row.kept < KEPT:
        return f"Nothing here keeps {percent(KEPT)}. Nearest: {told}."
    return f"Deploy {told}."


def caveat(section: Section) -> str:
    """Returns what the summary's k adds to the export, or what fewer would do; empty if unknown."""
    row = headline(section)
    if row is None:
        return ""
    if row.k < section.full_k:
        alike = [
            each
            for each in section.rows
            if each.k == section.full_k
            and (engine_name(each), each.precision) == (engine_name(row), row.precision)
            and each.latency_ms is not None
        ]
        return f"For comparison, {claim(section, min(alike, key=_median))}." if alike else ""
    fewer = [r for r in section.rows if r.k < row.k and r.latency_ms and r.kept is not None]
    if not fewer:
        return ""
    following = claim(section, min(fewer, key=lambda r: (-r.k, _median(r))))
    if max(each.kept or 0.0 for each in fewer) >= KEPT:
        return f"Fewer experts are not faster here: {following}."
    return f"No smaller k keeps {percent(KEPT)}. The next: {following}."


def claim(section: Section, row: Row) -> str:
    """Returns `k = 16 of 128 in INT8: 99.2% of the accuracy at 21 times the speed of PyTorch`."""
    whole = " (all experts)" if row.k == row.experts else " (as trained)"
    all_of_them = whole if row.k == section.full_k else ""
    engine = f", {line_name(row)}" if row.engine.startswith("pytorch") else ""
    told = f"k = {row.k} of {row.experts}{all_of_them} in {row.precision.upper()}{engine}"
    told = row.point or told
    if row.perplexity is not None:
        base = None if section.reference is None else section.reference.perplexity
        untouched = "" if base is None else f" (PyTorch: {base.value:.4g})"
        told += f": perplexity {row.perplexity.value:.4g}{untouched}"
    elif row.kept is not None:
        told += f": {percent(row.kept)} of the accuracy"
    ratio = section.speedup(row)
    if ratio is None:
        return told
    phase = "" if section.phase is None else f" in {section.phase}"
    against = f"the speed of PyTorch{section.place(row)}{phase}"
    if not section.faster_or_slower(row):
        return f"{told} at {against}, within the spread"
    return f"{told} at {times(ratio)[:-1]} times {against}"


def section_of(row: Row) -> tuple[str, int, str | None]:
    """Returns what tells a row's section from the others: its model, batch size and phase."""
    return row.model, row.batch, row.phase


def by_row(shown: Sequence[Section]) -> dict[tuple[str, int, str | None], Section]:
    """Returns sections by what `section_of` tells of their rows."""
    return {(each.model, each.batch, each.phase): each for each in shown}


def percent(share: float) -> str:
    """Returns a share to a tenth of a percent: `99.2%`, `100%`."""
    return f"{share:.1%}".replace(".0%", "%")


def times(ratio: float) -> str:
    """Returns a speed-up as a reader wants it: `3.1×`, `0.85×`, `21×`."""
    digits = 0 if ratio >= 20 else 1 if ratio >= 1 else 2
    return f"{ratio:.{digits}f}×"


def over(ratio: float) -> str:
    """Returns a time over the least time: `1.4`, `0.87`, `31`."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"


def milliseconds(value: float) -> str:
    """Returns three significant digits: `0.0712`, `4.15`, `212`."""
    if value <= 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _median(row: Row) -> float:
    return float("inf") if row.median_ms is None else row.median_ms
