"""Summarises a results file: its rows by model and batch, their lines over k, and the summary."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...common.latency import differs
from ..engines import PYTORCH_EAGER, PYTORCH_STACKED, titles
from ..metrics import inputs_needed
from ..results import DISTURBED, Accuracy, Perplexity, Regression, Results, Row
from .content import RowDecision, decision_of

KEPT = 0.99
"""The share of the untouched model's accuracy that a row must keep, unless a share is requested."""

DISAGREE = 0.5
"""Nothing is concluded from times whose rounds differ by more than this share of their median."""

METRICS = {Accuracy: "accuracy", Regression: "R²", Perplexity: "perplexity"}

UNTOUCHED = "PyTorch, untouched"  # the name of the reference in tables and charts
GPU_MS = "GPU ms"  # the heading of the times by CUDA events, in every table that has them


@dataclass(frozen=True, slots=True)
class Series:
    """The rows of one engine, lowering, precision and provider at one batch size, by k.

    `style` is the line's number in a results file, which determines its symbol in every figure.
    """

    name: str
    style: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One model at one batch size: its lines over k, and the untouched model.

    `sizes` names the batch size and, for a language model, the phase. `reference` is the untouched
    model on the CPU, and `gpu_reference` the one on the GPU, which is also among the lines. `keep`
    is the share that a row must keep. A `decision` may have `chosen` one of the rows.
    `waited` is the share of time for which the rows' threads waited for a core.
    """

    model: str
    batch: int
    experts: int
    reference: Row | None
    series: tuple[Series, ...]
    gpu_reference: Row | None = None
    phase: str | None = None
    sizes: str = ""
    keep: float = KEPT
    decision: RowDecision | None = None
    chosen: Row | None = None
    waited: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other work on the machine disturbed the times; if so, there are no ratios."""
        return self.waited >= DISTURBED

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
        return tuple(sorted({row.k for row in self.rows}))

    @property
    def quality(self) -> str | None:
        """The metric of the models: accuracy, perplexity or R²; None without labels."""
        kinds = {type(row.quality) for row in self.all_rows}
        return next((name for kind, name in METRICS.items() if kind in kinds), None)

    def includes(self, row: Row) -> bool:
        """Returns whether a row, which may have failed, is one of this section."""
        return (row.model, row.batch, row.phase) == (self.model, self.batch, self.phase)

    def base(self, row: Row) -> Row | None:
        """Returns the untouched model to compare a row's speed with: on its device, if known."""
        if row.on_gpu and self.gpu_reference is not None:
            return self.gpu_reference
        return self.reference

    def base_device(self, row: Row) -> str:
        """Returns where the base of a row ran: ` on the GPU`; empty if no row ran on a GPU."""
        base = self.base(row)
        if base is None or not any(other.on_gpu for other in self.rows):
            return ""
        return f" on the {'GPU' if base.on_gpu else 'CPU'}"

    def speedup(self, row: Row) -> float | None:
        """Returns how many times faster than its base a row is, by medians of the wall clock.

        Returns None if the times cannot be compared.
        """
        return self.ratio(self.base(row), row)

    def ratio(self, base: Row | None, row: Row) -> float | None:
        """Returns how many times faster than `base` a row is; None if they cannot be compared."""
        if base is None or base.median_ms is None or row.median_ms is None:
            return None
        incomparable = self.disturbed or disagreement(base, row)
        return None if incomparable else base.median_ms / row.median_ms

    def stacked(self, row: Row) -> Row | None:
        """Returns the other row of PyTorch with stacked experts on a row's device, if any."""
        stacked = (r for r in self.rows if r.engine == PYTORCH_STACKED and r.on_gpu == row.on_gpu)
        return next((r for r in stacked if r is not row and r.latency_ms), None)

    def all_experts(self, row: Row) -> Row | None:
        """Returns the fastest row with all experts in a row's runtime and precision.

        A gain over it comes from computing fewer experts, not from the runtime.
        """
        if row.k >= self.full_k or row.engine.startswith("pytorch"):
            return None
        full = [
            other
            for other in self.rows
            if other.k == self.full_k
            and engine_name(other) == engine_name(row)
            and other.precision == row.precision
            and other.latency_ms
        ]
        return min(full, key=_median, default=None)

    def gain(self, row: Row) -> float | None:
        return self.ratio(self.all_experts(row), row)

    def proven(self, row: Row) -> float | None:
        return proven_retention(row, self.full_k)

    def missing(self, row: Row) -> float:
        """Returns how many more inputs would prove that a row keeps enough; 0 if it is proven."""
        kept, low = row.kept, self.proven(row)
        if kept is None or low is None or low >= self.keep:
            return 0
        count, _ = row.samples
        if kept <= self.keep or not count:
            return math.inf
        return max(1, math.ceil(inputs_needed(count, kept, low, self.keep)) - count)

    def unproven(self, row: Row) -> str:
        """Describes how many more inputs would prove that a row keeps enough; empty if proven."""
        more, (_, unit) = self.missing(row), row.samples
        if not more:
            return ""
        if math.isinf(more):
            return f"Not proven: more {unit} needed"
        return f"Not proven: about {_round_up(math.ceil(more)):,} more {unit} needed"


def proven_retention(row: Row, full_k: int) -> float | None:
    """Returns the retention that a row is proven to reach: the lower end of its interval.

    With all experts in FP32, a row is the trained model, which parity proves without statistics.
    """
    exact = row.k == full_k and row.precision == "fp32" and row.point is None
    return row.kept if exact or row.kept_interval is None else row.kept_interval.low


def speeds_differ(base: Row | None, row: Row) -> bool:
    """Returns whether the speeds of two rows differ by more than the noise."""
    if base is None or base.latency_ms is None or row.latency_ms is None:
        return False
    return differs(row.latency_ms, base.latency_ms)


def disagreement(*rows: Row | None) -> float | None:
    """Returns the largest spread of some rows if it is too large to conclude anything."""
    spreads = [row.latency_ms.spread for row in rows if row is not None and row.latency_ms]
    largest = max(spreads, default=0.0)
    return largest if largest > DISAGREE else None


def _round_up(number: int) -> int:
    """Returns a number rounded up to two digits: 1 to 99, then 110, 1,300."""
    step: int = 10 ** max(0, len(str(number)) - 2)
    return -(-max(1, number) // step) * step


def engine_name(row: Row) -> str:
    """Returns the engine of a row without lowering and precision: `ONNX Runtime, cuda`."""
    return ", ".join(_name_parts(row, ()))


def line_name(row: Row) -> str:
    """Returns the name of a row's engine for readers: `ONNX Runtime, grouped, INT8`."""
    precision = "" if row.precision == "fp32" else row.precision.upper()
    bundle = row.bundle if row.apart else None
    return ", ".join(_name_parts(row, (row.lowering, precision, bundle)))


def _name_parts(row: Row, details: tuple[str | None, ...]) -> Iterator[str]:
    """Yields the engine, the graph's description and the provider, each if it is informative."""
    provider = None if row.provider in ("cpu", row.engine) else row.provider
    engine = titles().get(row.engine, row.engine)
    if row.computed_in is not None:
        engine += f" ({row.computed_in})"
    return (word for word in (engine, *details, provider) if word)


def row_name(row: Row) -> str:
    """Returns a row's name in tables: its engine, or the reference."""
    return UNTOUCHED if row.is_reference else line_name(row)


def short_name(row: Row) -> str:
    """Returns the name of a row's engine if there is little room: `grouped, INT8`."""
    return line_name(row).removeprefix("ONNX Runtime, ")


def sections(results: Results) -> tuple[Section, ...]:
    """Returns a section for each model, batch size and phase; its lines omit failed rows."""
    names = list(dict.fromkeys(line_name(r) for r in results.rows if not r.is_reference))
    decision = decision_of(results)
    keep = KEPT if decision is None or decision.keep is None else decision.keep
    listed = []
    for model in dict.fromkeys(row.model for row in results.rows):
        rows = results.of_model(model)
        for batch, phase in sorted({(row.batch, row.phase or "") for row in rows}):
            in_section = [r for r in rows if (r.batch, r.phase or "") == (batch, phase)]
            valid = [r for r in in_section if r.error is None]
            by_name: dict[str, list[Row]] = {}
            for row in sorted(valid, key=lambda row: row.k):
                if not row.is_reference:
                    by_name.setdefault(line_name(row), []).append(row)
            on_gpu = (
                r for r in valid if r.engine == PYTORCH_EAGER and r.on_gpu and r.precision == "fp32"
            )
            listed.append(
                Section(
                    model=model,
                    batch=batch,
                    experts=max(row.experts for row in rows),
                    reference=next((r for r in valid if r.is_reference), None),
                    series=tuple(
                        Series(name, style, tuple(by_name[name]))
                        for style, name in enumerate(names)
                        if name in by_name
                    ),
                    gpu_reference=next(on_gpu, None),
                    phase=phase or None,
                    sizes=in_section[0].sizes,
                    keep=keep,
                    decision=decision,
                    chosen=None if decision is None or not valid else valid[-1],
                    waited=_waited(results, model, batch, phase or None),
                )
            )
    return tuple(listed)


def _waited(results: Results, model: str, batch: int, phase: str | None) -> float:
    """Returns the share of a section's time that was spent waiting, from the protocol."""
    keys = {"model": model, "batch": batch, "phase": phase}
    shares = [
        wait["share"]
        for wait in results.protocol.get("waited", ())
        if all(wait.get(name, value) == value for name, value in keys.items())
    ]
    return max(shares, default=0.0)


def headline(section: Section) -> Row | None:
    """Returns the row that a section's summary is about.

    It is the fastest row that is proven, by the lower end of its interval, to keep at least 99% of
    the untouched model's accuracy, or the requested share. If none is proven, it is the row that
    needs the fewest additional inputs for a proof; if none seems to keep enough, the row that keeps
    the most; without labels, the fastest. It is never the untouched model itself.
    """

    def order(row: Row) -> tuple[float, float]:
        return (0.0 if row is section.chosen else section.missing(row), _median(row))

    return min(_contenders(section), key=order, default=None)


def _contenders(section: Section) -> list[Row]:
    """Returns the rows among which `headline` chooses."""
    if section.chosen is not None:
        return [section.chosen]
    timed = [row for row in section.rows if row.latency_ms and row is not section.gpu_reference]
    judged = [row for row in timed if row.kept is not None]
    if not judged:
        return timed
    shown = [row for row in judged if (section.proven(row) or 0.0) >= section.keep]
    least = min(section.keep, max(row.kept or 0.0 for row in judged))
    return shown or [row for row in judged if (row.kept or 0.0) >= least]


def summary(section: Section) -> str:
    """Returns the row to deploy, its speed and retention, or why there is none."""
    row = headline(section)
    if row is None:
        return f"Nothing could be measured for {section.model} at {section.sizes}."
    advice = _no_verdict(section, row)
    if advice is not None:
        return advice
    answer = claim(section, row)
    if row is section.chosen:
        return f"Deploy {answer}."
    if row.kept is None:
        return f"{unknown(row)}. Fastest: {answer}."
    if row.kept < section.keep:
        return f"No row keeps {percent(section.keep)}. Closest: {answer}."
    unproven = section.unproven(row)
    return f"{answer}. {unproven}." if unproven else f"Deploy {answer}."


def unknown(row: Row) -> str:
    """Returns why it is not known what a row keeps."""
    if row.accuracy is not None:
        return "The kept accuracy is not known: the untouched model gets none of the inputs right"
    if row.regression is not None:
        return "The kept R² is not known: the R² of the untouched model is 0 or less"
    return "Accuracy is not known: the inputs had no labels"


def _no_verdict(section: Section, row: Row) -> str | None:
    """Returns advice if the rounds of a row, its base, or a faster row disagree."""
    if section.disturbed:
        return (
            f"No verdict: threads spent {section.waited:.0%} of their time waiting for a core. "
            "Close other programs, or run again."
        )
    faster = [
        other
        for other in _contenders(section)
        if other.latency_ms and min(other.latency_ms.rounds) < (row.median_ms or 0.0)
    ]
    spread = disagreement(row, section.base(row), *faster)
    if spread is None:
        return None
    return f"No verdict: times disagree by {spread:.0%}. Close other programs, or run again."


def caveat(section: Section) -> str:
    """Returns the faster rows that are not proven, or the effect of fewer experts, if any."""
    row = headline(section)
    if row is not None and row is section.chosen and section.decision is not None:
        return section.decision.request
    return "" if row is None or row.kept is None else _other_rows(section, row)


def _other_rows(section: Section, row: Row) -> str:
    others = [r for r in section.rows if r is not row and r.latency_ms and r.kept is not None]
    if _no_verdict(section, row):
        return _by_accuracy(section, (row, *others))
    keep, unproven = section.keep, section.unproven
    faster = [r for r in others if _median(r) < _median(row) and r.kept and r.kept >= keep]
    if any(map(unproven, faster)) and not unproven(row):
        next_row = min(filter(unproven, faster), key=lambda r: (section.missing(r), _median(r)))
        return f"Faster: {claim(section, next_row)}. {unproven(next_row)}."
    fewer = [r for r in others if r.k < row.k]
    if row.k < section.full_k or not fewer:
        return ""
    smaller = claim(section, min(fewer, key=lambda r: (-r.k, _median(r))))
    if max(other.kept or 0.0 for other in fewer) >= keep:
        return f"Fewer experts are not faster here: {smaller}."
    return f"No smaller k keeps {percent(keep)}. The next: {smaller}."


def _by_accuracy(section: Section, rows: Sequence[Row]) -> str:
    """Returns the verdict on a smaller k by accuracy alone."""
    fewer, keep = [row for row in rows if row.k < section.full_k], section.keep
    enough = [row for row in fewer if (section.proven(row) or 0.0) >= keep]
    if enough:
        least = min(enough, key=lambda row: row.k)
        k = f"k = {least.k_of_n(' of ')}"
        return f"By accuracy alone, {k} is enough: {keeps(section, least)}."
    likely = [row for row in fewer if row.kept is not None and row.kept >= keep]
    if likely:
        nearest = min(likely, key=lambda row: (section.missing(row), row.k))
        k = f"k = {nearest.k_of_n(' of ')}"
        return f"By accuracy alone, {k} {keeps(section, nearest)}. {section.unproven(nearest)}."
    return f"By accuracy alone, no smaller k keeps {percent(keep)}." if fewer else ""


def claim(section: Section, row: Row) -> str:
    """Returns a row's description, the gain of fewer experts, its speed, and its retention.

    `k = 16 of 128 in INT8: 3.6 times the speed of all experts in ONNX Runtime, 48 times that of
    PyTorch; keeps 99.2% of the accuracy (at least 98.1%)`.
    """
    reason = " (all experts)" if row.k == row.experts else " (as trained)"
    full_k = reason if row.k == section.full_k else ""
    engine = f", {line_name(row)}" if row.engine.startswith("pytorch") else ""
    dropped = f" that were kept of {section.experts}" if row.experts < section.experts else ""
    sentence = f"k = {row.k_of_n(' of ')}{dropped}{full_k} in {row.precision.upper()}{engine}"
    facts = "; ".join(filter(None, (_speed(section, row), keeps(section, row))))
    if row.point is not None:
        point = re.sub(r", (fp\d+|int\d)\b", lambda match: f" in {match[1].upper()}", row.point)
        sentence = f"the model with {point}"
    return f"{sentence}{': ' if facts else ''}{facts}"


def _speed(section: Section, row: Row) -> str:
    """Returns a row's speed compared with all experts in its runtime, and with PyTorch."""
    phase = "" if section.phase is None else f" in {section.phase}"
    runtime = engine_name(row)
    against = {
        f"all experts in {runtime}": section.all_experts(row),
        f"PyTorch{section.base_device(row)}{phase}": section.base(row),
        "PyTorch with stacked experts": section.stacked(row),
    }
    phrases: list[str] = []
    for name, base in against.items():
        ratio = section.ratio(base, row)
        if ratio is None:
            continue
        speed = f"that of {name}" if phrases else f"the speed of {name}"
        equal = f"{speed}, within the spread"
        phrases.append(f"{times(ratio)[:-1]} times {speed}" if speeds_differ(base, row) else equal)
    spread = disagreement(row, section.base(row))
    if section.disturbed:
        return "times are disturbed"
    return ", ".join(phrases) or ("" if spread is None else f"times disagree by {spread:.0%}")


def keeps(section: Section, row: Row) -> str:
    """Returns a row's retention and its bound: `keeps 99.2% of the accuracy (at least 98.1%)`."""
    if row.perplexity is not None:
        base = None if section.reference is None else section.reference.perplexity
        untouched = "" if base is None else f" (PyTorch: {base.value:.4g})"
        return f"perplexity {row.perplexity.value:.4g}{untouched}"
    if row is section.chosen and section.decision is not None and section.decision.keeps:
        return section.decision.keeps
    metric = section.quality or "accuracy"
    return "" if row.kept is None else kept_text(row.kept, section.proven(row), metric)


def kept_text(kept: float, low: float | None, metric: str) -> str:
    """Returns the retention of a metric and its lower bound: `keeps 99.2% of the accuracy`."""
    if low is None or low == kept:
        return f"keeps {percent(kept)} of the {metric}"
    return f"keeps {percent(kept)} of the {metric} (at least {percent(floored(low))})"


def floored(share: float) -> float:
    """Returns a share rounded down to a tenth of a percent: rounding up could seem to suffice."""
    return math.floor(1e3 * share + 1e-9) / 1e3


def percent(share: float) -> str:
    """Returns a share to a tenth of a percent: `99.2%`, `100%`."""
    return f"{share:.1%}".replace(".0%", "%")


def times(ratio: float) -> str:
    """Returns a readable speed-up: `3.1×`, `0.85×`, `21×`."""
    digits = 0 if ratio >= 20 else 1 if ratio >= 1 else 2
    return f"{ratio:.{digits}f}×"


def excess(ratio: float) -> str:
    """Returns a time divided by the minimum time: `1.4`, `31`; below 1 the limit does not apply."""
    return (
        f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else "limit does not apply"
    )


def milliseconds(value: float) -> str:
    """Returns three significant digits: `0.0712`, `4.15`, `212`."""
    if value <= 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _median(row: Row) -> float:
    return math.inf if row.median_ms is None else row.median_ms
