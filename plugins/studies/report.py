"""What the analyses found as tables, the paper's numbers beside them, and as PNG charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bench.report.figures import (
    COLOURS,
    MARKERS,
    REFERENCE,
    by_factors,
    drawn,
    in_percent,
    log2_axis,
    look,
)
from ...common.text import table
from .findings import BestSubsets, ExpertStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRACTIONS = (2, 4, 8)
"""k = n/2, n/4 and n/8, as in the paper."""

TableRows = tuple[tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Printed:
    """What a paper printed: of the accuracy kept, by n/k and n; of k = n/4, accuracy by n."""

    retention: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    best_subset: Mapping[int, float] = field(default_factory=dict)
    random_subset: Mapping[int, float] = field(default_factory=dict)


NOTHING = Printed()


def text(studies: Sequence[ExpertStudy], paper: Printed = NOTHING) -> str:
    """Returns every table that has rows, under its title; the paper's numbers in brackets."""
    return "\n\n".join(
        f"{title}\n{table(header, rows)}"
        for title, (header, rows) in titled(studies, paper).items()
        if rows
    )


def titled(studies: Sequence[ExpertStudy], paper: Printed = NOTHING) -> dict[str, TableRows]:
    """Returns the tables by their titles."""
    return {
        "Accuracy kept by Algorithm 1": retention_rows(studies, paper),
        "Algorithm 1 and random experts": random_rows(studies),
        "All sets of k experts": subset_rows(studies, paper),
        "The share of ΣC that the top experts hold": share_rows(studies),
    }


def retention_rows(studies: Sequence[ExpertStudy], paper: Printed) -> TableRows:
    """Returns what is kept at n/2, n/4 and n/8, the paper's in brackets."""
    rows: list[tuple[str, ...]] = []
    for one in (study for study in studies if study.retention):
        cells = [one.model, percent(one.top1)]
        for fraction in FRACTIONS:
            kept = one.kept(one.experts // fraction) if one.experts % fraction == 0 else None
            cells.append(beside(kept, paper.retention.get(fraction, {}).get(one.experts)))
        rows.append(tuple(cells))
    return ("model", "all experts", *(f"kept at n/{part}" for part in FRACTIONS)), rows


def random_rows(studies: Sequence[ExpertStudy]) -> TableRows:
    """Returns Algorithm 1 beside the random mean, by model and k."""
    header = ("model", "k", "Algorithm 1", "random, mean", "std", "σ above")
    rows: list[tuple[str, ...]] = [
        (
            *(one.model, f"{choice.k}/{one.experts}"),
            *(percent(choice.algorithm_1), percent(choice.mean), percent(choice.std)),
            "–" if choice.sigmas is None else f"{choice.sigmas:.1f}",
        )
        for one in studies
        for choice in one.random
    ]
    return header, rows


def subset_rows(studies: Sequence[ExpertStudy], paper: Printed) -> TableRows:
    """Returns what exhaustive searches found; those that were too many have dashes."""
    header = ("model", "k", "sets", "best per input", "Algorithm 1", "best for all", "average")
    rows: list[tuple[str, ...]] = []
    for one in studies:
        for subset in one.subsets:
            quarter = one.experts if subset.k * 4 == one.experts else 0
            rows.append(
                (
                    *(one.model, f"{subset.k}/{one.experts}", sets(subset.subsets)),
                    beside(subset.best, paper.best_subset.get(quarter)),
                    percent(subset.algorithm_1),
                    percent(subset.fixed),
                    beside(subset.average, paper.random_subset.get(quarter)),
                    "–" if subset.distinct is None else str(subset.distinct),
                )
            )
    return (*header, "distinct best"), rows


def share_rows(studies: Sequence[ExpertStudy]) -> TableRows:
    """Returns what a half, a quarter and an eighth of each layer's experts hold, on average."""
    header = ("model", "layer", *(f"top n/{fraction}" for fraction in FRACTIONS))
    rows: list[tuple[str, ...]] = []
    for one in studies:
        for layer in one.shares:
            n = len(layer.mean)
            held = [layer.mean[n // f - 1] if n % f == 0 else None for f in FRACTIONS]
            rows.append((one.model, layer.layer, *map(percent, held)))
    return header, rows


def percent(share: float | None) -> str:
    """Returns a share as `94.2%`, `–` for none."""
    return "–" if share is None else f"{share:.1%}"


def beside(ours: float | None, paper: float | None) -> str:
    """Returns ours, and the paper's in brackets where there are both."""
    return percent(ours) if ours is None or paper is None else f"{percent(ours)} ({percent(paper)})"


def sets(number: int) -> str:
    """Returns a number of sets: `12,870`, `4.4e9`."""
    return f"{number:,}" if number < 10_000_000 else f"{number:.1e}"


SHADES = 0.15, 0.95
"""Of the colour map that tells models of growing n apart."""


def figures(
    studies: Sequence[ExpertStudy], directory: Path, paper: Printed = NOTHING
) -> tuple[Path, ...]:
    """Writes a chart for each analysis that was made; returns their paths.

    `experts_retention.png`, `experts_random.png`, `experts_subsets.png`, `experts_shares.png`.
    """
    tried = any(subset.best is not None for one in studies for subset in one.subsets)
    charts: dict[str, tuple[bool, Callable[[Sequence[ExpertStudy], Path], None]]] = {
        "retention": (any(one.retention for one in studies), partial(_retention, printed=paper)),
        "random": (any(one.random for one in studies), _random),
        "subsets": (tried, _subsets),
        "shares": (any(one.shares for one in studies), _shares),
    }
    written = []
    for name, (there, draw) in charts.items():
        if there:
            written.append(directory / f"experts_{name}.png")
            draw(studies, written[-1])
    return tuple(written)


def _retention(studies: Sequence[ExpertStudy], path: Path, printed: Printed) -> None:
    """What is kept over the share of experts, a line per model; and over n, a line per share."""
    with drawn([path], (8, 4.0)) as ((left, right),):
        left.set_title("Accuracy kept by Algorithm 1")
        for one, colour in zip(studies, _shades(len(studies)), strict=True):
            points = [(k.k / one.experts, k.retention) for k in one.retention]
            label = f"n = {one.experts}" if _differ(studies) else one.model
            left.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=label)
        _share_axis(left, "share of the experts kept, k/n")
        _percent_axis(left, "of all experts' accuracy")
        right.set_title("The same over n")
        for place, fraction in enumerate(FRACTIONS):
            ours = [
                (one.experts, kept)
                for one in studies
                if one.experts % fraction == 0
                and (kept := one.kept(one.experts // fraction)) is not None
            ]
            if ours:
                right.plot(*zip(*ours, strict=True), label=f"k = n/{fraction}", **look(place))
            measured = {n for n, _ in ours}
            paper = [
                (n, v) for n, v in printed.retention.get(fraction, {}).items() if n in measured
            ]
            if paper:
                label = f"k = n/{fraction}, the paper on MNIST"
                dotted = {"color": COLOURS[place], "linewidth": 1.2, "linestyle": ":"}
                right.plot(*zip(*paper, strict=True), label=label, **dotted)
        _experts_axis(right, studies)
        _percent_axis(right, "")


def _random(studies: Sequence[ExpertStudy], path: Path) -> None:
    """Algorithm 1 and random choices over n, a chart per share of experts."""
    shares = [f for f in FRACTIONS if any(_random_at(one, f) for one in studies)]
    with drawn([path], (8, 3.4), columns=max(1, len(shares))) as (charts,):
        for axes, fraction in zip(charts, shares, strict=False):
            axes.set_title(f"k = n/{fraction}")
            choices = [(one, choice) for one in studies if (choice := _random_at(one, fraction))]
            n = [one.experts for one, _ in choices]
            chosen = [choice.algorithm_1 for _, choice in choices]
            axes.plot(n, chosen, label="Algorithm 1", **look(0))
            means, stds = (
                [choice.mean for _, choice in choices],
                [choice.std for _, choice in choices],
            )
            label = "random experts, mean and standard deviation of the seeds"
            axes.errorbar(n, means, yerr=stds, capsize=2.5, elinewidth=1, label=label, **look(1))
            dashed = {"color": REFERENCE, "linestyle": "--", "linewidth": 1.4}
            axes.plot(n, [one.top1 for one, _ in choices], label="all experts", **dashed)
            _experts_axis(axes, studies)
            _percent_axis(axes, "top-1 accuracy" if fraction == shares[0] else "")


def _random_at(one: ExpertStudy, fraction: int) -> Any:
    return next((choice for choice in one.random if choice.k * fraction == one.experts), None)


def _subsets(studies: Sequence[ExpertStudy], path: Path) -> None:
    """How good subsets can be, and how many different ones inputs would want."""
    searches: list[tuple[ExpertStudy, BestSubsets]] = [
        (one, subset) for one in studies for subset in one.subsets if subset.best is not None
    ]
    places = np.arange(len(searches))
    names = [f"{search.k} of {one.experts}" for one, search in searches]
    with drawn([path], (8, 4.2), legend=2) as ((left, right),):
        left.set_title("Accuracy with k of n experts")
        kinds = (
            ("best per input, knowing the label", [search.best for _, search in searches]),
            ("Algorithm 1", [search.algorithm_1 for _, search in searches]),
            ("best single set for all inputs", [search.fixed for _, search in searches]),
            ("average over all sets", [search.average for _, search in searches]),
        )
        for (label, values), colour, marker in zip(kinds, COLOURS, MARKERS, strict=False):
            left.plot(places, values, color=colour, marker=marker, linestyle="", label=label)
        _percent_axis(left, "top-1 accuracy")
        right.set_title("Different best sets")
        most = [min(search.subsets, one.samples) for one, search in searches]
        right.bar(places, most, color="#e4e8ee", label="possible: sets, or inputs if fewer")
        right.bar(
            places, [search.distinct for _, search in searches], color=COLOURS[0], width=0.6,
            label="best for at least one input",
        )  # fmt: skip
        by_factors(right)
        for axes in (left, right):
            axes.set_xticks(places, names, rotation=45, ha="right", rotation_mode="anchor")


def _shares(studies: Sequence[ExpertStudy], path: Path) -> None:
    """What the top experts hold of ΣC, over their share of the experts."""
    lines = [(one, layer) for one in studies for layer in one.shares]
    with drawn([path], (6.4, 4.0), columns=1) as ((axes,),):
        axes.set_title("What the top experts hold of ΣC")
        for (one, layer), colour in zip(lines, _shades(len(lines)), strict=True):
            x = np.arange(1, len(layer.mean) + 1) / len(layer.mean)
            name = f"n = {one.experts}" if _differ(studies) else one.model
            label = name if one.layers == 1 else f"{name}, {layer.layer}"
            axes.plot(x, layer.mean, color=colour, linewidth=1.6, label=label)
            axes.fill_between(x, layer.low, layer.high, color=colour, alpha=0.12, linewidth=0)
        x = np.linspace(1 / 64, 1, 64)
        axes.plot(x, x, color=REFERENCE, linestyle="--", linewidth=1.2, label="all alike")
        _share_axis(axes, "share of the experts")
        _percent_axis(axes, "mean; 10th to 90th percentile of inputs")


def _differ(studies: Sequence[ExpertStudy]) -> bool:
    """Whether n tells the models apart."""
    return len({one.experts for one in studies}) == len(studies) > 1


def _shades(count: int) -> list[Any]:
    """Colours that grow darker, for models of growing n; the first colour for one alone."""
    import matplotlib as mpl

    if count == 1:
        return [COLOURS[0]]
    return list(mpl.colormaps["viridis_r"](np.linspace(*SHADES, count)))


def _share_axis(axes: Axes, label: str) -> None:
    shares = [2.0**-power for power in range(8)]
    log2_axis(axes, shares, label, lambda share: "1" if share == 1 else f"1/{1 / share:.0f}")


def _experts_axis(axes: Axes, studies: Sequence[ExpertStudy]) -> None:
    log2_axis(axes, sorted({one.experts for one in studies}), "experts, n")


def _percent_axis(axes: Axes, label: str) -> None:
    in_percent(axes.yaxis)
    axes.set_ylim(bottom=0, top=max(1.03, axes.get_ylim()[1] if axes.get_ylim()[1] > 1.05 else 0))
    axes.set_ylabel(label)
