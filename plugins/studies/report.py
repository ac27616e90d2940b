"""Formats the analyses as tables, with the paper's numbers, and as PNG charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...bench.report.charts import DASHED, DOTTED, REFERENCE, SYMBOLS, Spec, axis
from ...common.text import table
from .figures import BARE, INKS, bars, curve, curves, draw, ordinal
from .findings import BestSubsets, ExpertStudy

FRACTIONS = (2, 4, 8)
"""k = n/2, n/4 and n/8, as in the paper."""

TableRows = tuple[tuple[str, ...], list[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's shares of the accuracy kept, by n/k and n, and accuracies at k = n/4, by n."""

    retention: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    best_subset: Mapping[int, float] = field(default_factory=dict)
    random_subset: Mapping[int, float] = field(default_factory=dict)


NO_PAPER = Paper()


def text(studies: Sequence[ExpertStudy], paper: Paper = NO_PAPER) -> str:
    """Returns each table with rows under its title, with the paper's numbers in brackets."""
    return "\n\n".join(
        f"{title}\n{table(header, rows)}"
        for title, (header, rows) in titled_tables(studies, paper).items()
        if rows
    )


def titled_tables(studies: Sequence[ExpertStudy], paper: Paper = NO_PAPER) -> dict[str, TableRows]:
    return {
        "Accuracy kept by Algorithm 1": retention_rows(studies, paper),
        "Algorithm 1 and random experts": random_rows(studies),
        "All sets of k experts": subset_rows(studies, paper),
        "The top experts' share of ΣC": share_rows(studies),
    }


def retention_rows(studies: Sequence[ExpertStudy], paper: Paper) -> TableRows:
    """Returns the shares of the accuracy kept at n/2, n/4 and n/8."""
    rows: list[tuple[str, ...]] = []
    for study in (study for study in studies if study.retention):
        cells = [study.model, percent(study.top1)]
        for fraction in FRACTIONS:
            kept = study.kept(study.experts // fraction) if study.experts % fraction == 0 else None
            cells.append(with_paper(kept, paper.retention.get(fraction, {}).get(study.experts)))
        rows.append(tuple(cells))
    return ("model", "all experts", *(f"kept at n/{part}" for part in FRACTIONS)), rows


def random_rows(studies: Sequence[ExpertStudy]) -> TableRows:
    """Returns the accuracies of Algorithm 1 and of random experts, by model and k."""
    header = ("model", "k", "Algorithm 1", "random, mean", "std", "σ above")
    rows: list[tuple[str, ...]] = [
        (
            *(study.model, f"{choice.k}/{study.experts}"),
            *(percent(choice.algorithm_1), percent(choice.mean), percent(choice.std)),
            "–" if choice.sigmas is None else f"{choice.sigmas:.1f}",
        )
        for study in studies
        for choice in study.random
    ]
    return header, rows


def subset_rows(studies: Sequence[ExpertStudy], paper: Paper) -> TableRows:
    """Returns the results of exhaustive searches, with dashes for searches above the limit."""
    header = ("model", "k", "sets", "best per input", "Algorithm 1", "best for all", "average")
    rows: list[tuple[str, ...]] = []
    for study in studies:
        for subset in study.subsets:
            quarter = study.experts if subset.k * 4 == study.experts else 0
            rows.append(
                (
                    *(study.model, f"{subset.k}/{study.experts}", sets(subset.subsets)),
                    with_paper(subset.best, paper.best_subset.get(quarter)),
                    percent(subset.algorithm_1),
                    percent(subset.fixed),
                    with_paper(subset.average, paper.random_subset.get(quarter)),
                    "–" if subset.distinct is None else str(subset.distinct),
                )
            )
    return (*header, "distinct best"), rows


def share_rows(studies: Sequence[ExpertStudy]) -> TableRows:
    """Returns the mean shares of the top half, quarter and eighth of each layer's experts."""
    header = ("model", "layer", *(f"top n/{fraction}" for fraction in FRACTIONS))
    rows: list[tuple[str, ...]] = []
    for study in studies:
        for layer in study.shares:
            n = len(layer.mean)
            known = [layer.mean[n // f - 1] if n % f == 0 else None for f in FRACTIONS]
            rows.append((study.model, layer.layer, *map(percent, known)))
    return header, rows


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def with_paper(ours: float | None, paper: float | None) -> str:
    """Returns our number, followed by the paper's in brackets if both are known."""
    return percent(ours) if ours is None or paper is None else f"{percent(ours)} ({percent(paper)})"


def sets(number: int) -> str:
    """Formats a number of sets, such as `12,870` or `4.4e9`."""
    return f"{number:,}" if number < 10_000_000 else f"{number:.1e}"


def figures(
    studies: Sequence[ExpertStudy], directory: Path, paper: Paper = NO_PAPER
) -> tuple[Path, ...]:
    """Writes a chart for each analysis that was made; returns the charts' paths.

    They are `experts_NAME.png` for the analyses `retention`, `random`, `subsets` and `shares`.
    """
    tried = any(subset.best is not None for study in studies for subset in study.subsets)
    charts: dict[str, tuple[bool, Callable[[Sequence[ExpertStudy], Path], None]]] = {
        "retention": (any(study.retention for study in studies), partial(_retention, paper=paper)),
        "random": (any(study.random for study in studies), _random),
        "subsets": (tried, _subsets),
        "shares": (any(study.shares for study in studies), _shares),
    }
    written = []
    for name, (measured, write) in charts.items():
        if measured:
            written.append(directory / f"experts_{name}.png")
            write(studies, written[-1])
    return tuple(written)


def _retention(studies: Sequence[ExpertStudy], path: Path, paper: Paper) -> None:
    """Draws retention over the share of experts for each model, and over n for each share."""
    left, right = [], []
    for study, ink in zip(studies, _shades(len(studies)), strict=True):
        label = f"n = {study.experts}" if _differ(studies) else study.model
        points = [(k.k / study.experts, k.retention) for k in study.retention]
        left += curve(0, label, points, ink=ink, symbol=BARE)
    for number, fraction in enumerate(FRACTIONS):
        ours = [
            (study.experts, kept)
            for study in studies
            if study.experts % fraction == 0
            and (kept := study.kept(study.experts // fraction)) is not None
        ]
        right += curve(number, f"k = n/{fraction}", ours)
        measured = {n for n, _ in ours}
        theirs = [(n, v) for n, v in paper.retention.get(fraction, {}).items() if n in measured]
        label = f"k = n/{fraction}, the paper on MNIST"
        right += curve(number, label, theirs, dash=DOTTED, symbol=BARE)
    shares = axis("x", "x", "share of the experts kept, k/n", "k")
    panels = [
        (
            "Accuracy kept by Algorithm 1",
            curves(_shares_axis(shares), _percent("of all experts' accuracy")),
            left,
        ),
        ("Accuracy kept, by n", curves(_experts_axis(studies), _percent("")), right),
    ]
    draw(path, panels)


def _random(studies: Sequence[ExpertStudy], path: Path) -> None:
    """Draws Algorithm 1 and random choices over n, in one chart for each share of experts."""
    shares = [f for f in FRACTIONS if any(_random_at(study, f) for study in studies)]
    panels = []
    for fraction in shares:
        choices = [(study, choice) for study in studies if (choice := _random_at(study, fraction))]
        rows = curve(0, "Algorithm 1", [(study.experts, c.algorithm_1) for study, c in choices])
        label = "random experts, mean and standard deviation of the seeds"
        for study, c in choices:
            ends = {"low": c.mean - c.std, "high": c.mean + c.std}
            rows += curve(1, label, [(study.experts, c.mean)], **ends)
        style = {"ink": REFERENCE, "dash": DASHED, "symbol": BARE}
        untouched = [(study.experts, study.top1) for study, _ in choices]
        rows += curve(0, "all experts", untouched, **style)
        title = "top-1 accuracy" if fraction == shares[0] else ""
        panels.append((f"k = n/{fraction}", curves(_experts_axis(studies), _percent(title)), rows))
    draw(path, panels, columns=3)


def _random_at(study: ExpertStudy, fraction: int) -> Any:
    return next((choice for choice in study.random if choice.k * fraction == study.experts), None)


def _subsets(studies: Sequence[ExpertStudy], path: Path) -> None:
    """Draws the accuracies of subsets, and the number of different best subsets."""
    searches: list[tuple[ExpertStudy, BestSubsets]] = [
        (study, subset) for study in studies for subset in study.subsets if subset.best is not None
    ]
    kinds: dict[str, list[float | None]] = {
        "best per input, knowing the label": [search.best for _, search in searches],
        "Algorithm 1": [search.algorithm_1 for _, search in searches],
        "best single set for all inputs": [search.fixed for _, search in searches],
        "average over all sets": [search.average for _, search in searches],
    }
    left = [
        row
        for number, (name, values) in enumerate(kinds.items())
        for row in curve(number, name, enumerate(values), dash=[0, 9])
    ]
    possible = [min(search.subsets, study.samples) for study, search in searches]
    style = {"ink": "var(--faint)", "symbol": SYMBOLS[1]}
    right = curve(0, "possible: sets, or inputs if fewer", enumerate(possible), **style)
    found = [search.distinct for _, search in searches]
    right += curve(0, "best for at least one input", enumerate(found), symbol=SYMBOLS[1])
    ticks = {"labelExpr": "ticks[datum.value]", "labelAngle": -45, "labelOverlap": False}
    counted = axis("y", "y", "", "log")
    counted["scale"] |= {"domainMin": 0.7}
    panels = [
        (
            "Accuracy with k of n experts",
            curves(ordinal(None, **ticks), _percent("top-1 accuracy")),
            left,
        ),
        ("Different best sets", bars(None, counted, 0.7, **ticks), right),
    ]
    draw(path, panels, ticks=[f"{search.k} of {study.experts}" for study, search in searches])


def _shares(studies: Sequence[ExpertStudy], path: Path) -> None:
    """Draws the top experts' share of ΣC over their share of the experts."""
    measured = [(study, layer) for study in studies for layer in study.shares]
    rows = []
    for (study, layer), ink in zip(measured, _shades(len(measured)), strict=True):
        name = f"n = {study.experts}" if _differ(studies) else study.model
        label = name if study.layers == 1 else f"{name}, {layer.layer}"
        for number, (mean, low, high) in enumerate(
            zip(layer.mean, layer.low, layer.high, strict=True)
        ):
            point = [((number + 1) / len(layer.mean), mean)]
            rows += curve(0, label, point, ink=ink, symbol=BARE, low=low, high=high)
    uniform = [(share / 64, share / 64) for share in range(1, 65)]
    rows += curve(0, "uniform router", uniform, ink=REFERENCE, dash=DASHED, symbol=BARE)
    x = _shares_axis(axis("x", "x", "share of the experts", "k"))
    y = _percent("mean; 10th to 90th percentile of inputs")
    draw(path, [("The top experts' share of ΣC", curves(x, y), rows)], columns=1)


def _differ(studies: Sequence[ExpertStudy]) -> bool:
    """Returns whether there are several models, each with a different n."""
    return len({study.experts for study in studies}) == len(studies) > 1


def _shades(count: int) -> list[str]:
    """Returns a colour for each model, from light to dark; the usual colour for a single model."""
    if count == 1:
        return [INKS[0]]
    shares = [index / (count - 1) for index in range(count)]
    return [f"hsl({90 + 150 * share:.0f}, 55%, {68 - 42 * share:.0f}%)" for share in shares]


def _shares_axis(x: Spec) -> Spec:
    x["axis"]["values"] = [2.0**-power for power in range(8)]
    x["axis"]["labelExpr"] = "datum.value == 1 ? '1' : '1/' + format(1 / datum.value, '.0f')"
    return x


def _experts_axis(studies: Sequence[ExpertStudy]) -> Spec:
    x = axis("x", "x", "experts, n", "k")
    x["axis"]["values"] = sorted({study.experts for study in studies})
    return x


def _percent(title: str) -> Spec:
    return axis("y", "y", title, "percent")
