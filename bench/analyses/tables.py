"""What the analyses found as tables: header and rows of text, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...common.text import table
from .findings import ExpertStudy

FRACTIONS = (2, 4, 8)
"""k = n/2, n/4 and n/8, as in the paper."""

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
Published = Mapping[int, Mapping[int, float]]
"""What a paper printed of the accuracy kept, by n/k and n."""

Printed = Mapping[int, float]
"""What a paper printed for k = n/4, by n."""

NOTHING: Mapping[int, float] = MappingProxyType({})


def retention_rows(studies: Sequence[ExpertStudy], paper: Published = MappingProxyType({})) -> Rows:
    """Returns what is kept at n/2, n/4 and n/8, the paper's in brackets."""
    rows: list[tuple[str, ...]] = []
    for one in (each for each in studies if each.retention):
        cells = [one.model, percent(one.top1)]
        for fraction in FRACTIONS:
            kept = one.kept(one.experts // fraction) if one.experts % fraction == 0 else None
            cells.append(beside(kept, paper.get(fraction, NOTHING).get(one.experts)))
        rows.append(tuple(cells))
    return ("model", "all experts", *(f"kept at n/{each}" for each in FRACTIONS)), rows


def random_rows(studies: Sequence[ExpertStudy]) -> Rows:
    """Returns Algorithm 1 beside the random mean, by model and k."""
    header = ("model", "k", "Algorithm 1", "random, mean", "std", "σ above")
    rows: list[tuple[str, ...]] = [
        (
            *(one.model, f"{each.k}/{one.experts}"),
            *(percent(each.algorithm_1), percent(each.mean), percent(each.std)),
            "–" if each.sigmas is None else f"{each.sigmas:.1f}",
        )
        for one in studies
        for each in one.random
    ]
    return header, rows


def subset_rows(
    studies: Sequence[ExpertStudy], best: Printed = NOTHING, average: Printed = NOTHING
) -> Rows:
    """Returns what exhaustive searches found; those that were too many have dashes.

    `best` and `average` are the paper's, in brackets.
    """
    header = ("model", "k", "sets", "best per input", "Algorithm 1", "best for all", "average")
    rows: list[tuple[str, ...]] = []
    for one in studies:
        for each in one.subsets:
            quarter = one.experts if each.k * 4 == one.experts else 0
            rows.append(
                (
                    *(one.model, f"{each.k}/{one.experts}", sets(each.subsets)),
                    beside(each.best, best.get(quarter)),
                    percent(each.algorithm_1),
                    percent(each.fixed),
                    beside(each.average, average.get(quarter)),
                    "–" if each.distinct is None else str(each.distinct),
                )
            )
    return (*header, "distinct best"), rows


def share_rows(studies: Sequence[ExpertStudy]) -> Rows:
    """Returns what a half, a quarter and an eighth of each layer's experts hold, on average."""
    header = ("model", "layer", *(f"top n/{each}" for each in FRACTIONS))
    rows: list[tuple[str, ...]] = []
    for one in studies:
        for layer in one.shares:
            n = len(layer.mean)
            held = [layer.mean[n // f - 1] if n % f == 0 else None for f in FRACTIONS]
            rows.append((one.model, layer.layer, *map(percent, held)))
    return header, rows


def text(
    studies: Sequence[ExpertStudy],
    *,
    retention: Published = MappingProxyType({}),
    best: Printed = NOTHING,
    average: Printed = NOTHING,
) -> str:
    """Returns every table that has rows, under its title; the paper's numbers in brackets."""
    return "\n\n".join(
        f"{title}\n{table(header, rows)}"
        for title, (header, rows) in titled(
            studies, retention=retention, best=best, average=average
        ).items()
        if rows
    )


def titled(
    studies: Sequence[ExpertStudy],
    *,
    retention: Published = MappingProxyType({}),
    best: Printed = NOTHING,
    average: Printed = NOTHING,
) -> dict[str, Rows]:
    """Returns the tables by their titles."""
    return {
        "Accuracy kept by Algorithm 1": retention_rows(studies, retention),
        "Algorithm 1 and random experts": random_rows(studies),
        "All sets of k experts": subset_rows(studies, best, average),
        "The share of ΣC that the top experts hold": share_rows(studies),
    }


def percent(share: float | None) -> str:
    """Returns a share as `94.2%`, `–` for none."""
    return "–" if share is None else f"{share:.1%}"


def beside(ours: float | None, paper: float | None) -> str:
    """Returns ours, and the paper's in brackets where there are both."""
    return percent(ours) if ours is None or paper is None else f"{percent(ours)} ({percent(paper)})"


def sets(number: int) -> str:
    """Returns a number of sets: `12,870`, `4.4e9`."""
    return f"{number:,}" if number < 10_000_000 else f"{number:.1e}"
