"""The rows: every pair of values once, by allpairspy, but for what no row can hold together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product

from allpairspy import AllPairs
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.targets import TARGETS
from moexport.tests.pairs.rows import FACTORS, Result, Row
from moexport.tests.pairs.sources import OWN, RECORDED

Pair = tuple[tuple[str, str], tuple[str, str]]

ORDER = ("source", "lowering", "command", "target", "precision", "k", "edits")
ORDER += tuple(each for each in FACTORS if each not in ORDER)
"""The factors with many values first: so there are fewer rows."""

SOFT, MUMOE, EXPERTS = "soft-moe", "mumoe", "experts"

KINDS = {name: MUMOE if name.startswith("mumoe") else SOFT for name in RECORDED}
KINDS |= {name: MUMOE if "MuMoE" in name else SOFT for name in OWN}
KINDS |= {"adapter Experts": EXPERTS, "transformers": EXPERTS}


def conflict(row: Row) -> bool:
    """Whether registries say that a row holds a lowering of another kind, or what a target refuses.

    Such a pair is refused before all else of its row is looked at, so it gets a row of its own.
    """
    source, lowering = row.get("source"), row.get("lowering", "auto")
    target, precision = row.get("target"), row.get("precision")
    if source and lowering != "auto" and lowering not in lowerings_of(KINDS[source]):  # type: ignore[arg-type]
        return True
    if source and row.get("edits") in ("rewrite", "steer") and KINDS[source] != MUMOE:
        return True
    if lowering != "auto" and target and source:
        served = lowerings_of(KINDS[source])[lowering].targets  # type: ignore[index]
        if target not in served:
            return True
    return bool(target and precision in TARGETS[target].refused)  # type: ignore[index, operator]


def rows() -> list[Row]:
    """All rows of pairs that are no conflict."""

    def fits(values: Sequence[str]) -> bool:
        return not conflict(dict(zip(ORDER, values, strict=False)))

    found = AllPairs([FACTORS[each] for each in ORDER], filter_func=fits)
    return [dict(zip(ORDER, values, strict=True)) for values in found]


def pairs(row: Row) -> Iterator[Pair]:
    """The pairs of values in a row."""
    yield from combinations(((each, row[each]) for each in FACTORS), 2)


def all_pairs() -> set[Pair]:
    return {
        ((a, first), (b, second))
        for a, b in combinations(FACTORS, 2)
        for first, second in product(FACTORS[a], FACTORS[b])
    }


def right_pairs(results: Iterable[Result]) -> set[Pair]:
    return {pair for each in results if each.verdict == "right" for pair in pairs(each.row)}


PLAIN: dict[str, str] = {
    "source": "soft-moe-vit",
    "k": "number",
    "precision": "fp32",
    "lowering": "auto",
    "target": "ort-cpu",
    "batch": "default",
    "tokens": "default",
    "edits": "none",
    "data": "npz",
    "quantize": "experts",
    "expose-routing": "no",
    "command": "inspect",
}
"""What is beside a pair that has a row of its own."""

SMALL = ("soft-moe-pytorch", "mumoe", "adapter Experts")
"""A source of each kind."""


def alone(pair: Pair) -> Row:
    """A row of a pair in which, as far as the registries tell, nothing else is refused."""
    given = dict(pair)
    best = {**PLAIN, **given}
    for source, precision, target in product(
        (best["source"], *SMALL), ("fp32", "int8"), ("ort-cpu", "onnx", "tensorrt")
    ):
        row = {**PLAIN, "source": source, "precision": precision, "target": target, **given}
        if row["quantize"] == "all" and row["precision"] == "fp32":
            continue
        if not conflict(row):
            return row
    return best
