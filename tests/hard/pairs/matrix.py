"""The rows: every pair of values once, by allpairspy, but for what no row can hold together."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path

from allpairspy import AllPairs
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.targets import TARGETS
from moexport.tests.hard.pairs.rows import FACTORS, Result, Row
from moexport.tests.hard.pairs.sources import OWN, RECORDED

Pair = tuple[tuple[str, str], tuple[str, str]]

FIRST = ("source", "lowering", "command", "target", "precision", "k", "edits")
ORDER = (*FIRST, *(each for each in FACTORS if each not in FIRST))
"""The factors with many values first: so there are fewer rows."""

SOFT, MUMOE, EXPERTS = "soft-moe", "mumoe", "experts"

KINDS = {name: MUMOE if name.startswith("mumoe") else SOFT for name in RECORDED}
KINDS |= {name: MUMOE if "MuMoE" in name else SOFT for name in OWN}
KINDS |= {"adapter Experts": EXPERTS, "transformers": EXPERTS}


WHOLE = ("unfactorised", "gathered")
"""Lowerings of muMoE layers whose tensor is no product of factors."""

LAYERS = ("soft-moe-pytorch", "soft-moe-conv", "soft-moe-fkodom", "mumoe")
"""Sources without anything beside their layer."""

WITHOUT_TOKENS = ("soft-moe-vit", "soft-moe-mnist", "mumoe-mixer", *OWN)


def conflict(row: Row) -> bool:
    """Whether it is known of a row, whole or in part, that its options do not go together.

    What is refused hides the rest of its row, so each such pair gets a row of its own (`alone`).
    """
    source, lowering = row.get("source", ""), row.get("lowering", "auto")
    target, precision = row.get("target", ""), row.get("precision", "fp32")
    kind, floats = KINDS.get(source), precision in ("fp32", "fp16", "bf16")
    record = next((each for each in TARGETS if each.name == target), None)
    engines = record is not None and record.backend is not None
    lowerings = lowerings_of(kind) if kind else {}
    edits, command, k = row.get("edits"), row.get("command"), row.get("k")
    return any(
        (
            kind and lowering != "auto" and lowering not in lowerings,
            lowering in lowerings and target and target not in lowerings[lowering].targets,
            record is not None and precision in record.refused,
            kind == MUMOE and lowering in WHOLE and source != "adapter MuMoE whole",
            source == "adapter MuMoE whole" and lowering == "factorised",
            lowering == "fused" and precision == "fp8",
            lowering == "fused" and precision in ("bf16", "int8") and target != "ort-cuda",
            lowering == "fused" and precision == "fp16" and target != "ort-cuda",
            lowering == "fused" and source in ("soft-moe-pytorch", "soft-moe-fkodom"),
            lowering == "slots",  # no source has experts with a capacity
            kind == MUMOE and precision == "int4",
            kind == MUMOE and precision == "int8" and target == "ort-cuda",
            row.get("quantize") == "all" and precision == "fp8",
            source == "transformers" and command == "calibrate",
            edits in ("rewrite", "steer") and kind in (SOFT, EXPERTS),
            row.get("quantize") == "all" and (floats or source in LAYERS),
            row.get("data") == "none" and precision in ("int8", "fp8"),
            row.get("expose-routing") == "yes" and k == "n" and kind == SOFT,
            k == "input" and (edits == "recipe" or kind == EXPERTS),
            row.get("tokens", "default") != "default" and source in WITHOUT_TOKENS,
            source == "transformers" and engines,
            command == "tune" and (engines or precision in ("bf16", "fp8")),
            command == "tune" and precision == "fp16" and target != "ort-cuda",
            command == "build" and record is not None and not engines,
        )
    )


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
    """The pairs whose export, or command after it, was right."""
    return {
        pair
        for each in results
        for pair in pairs(each.row)
        if each.verdict == "right" or (each.exported and "command" not in (pair[0][0], pair[1][0]))
    }


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

SMALL = ("soft-moe-pytorch", "mumoe", "adapter MuMoE whole", "adapter Experts")
"""A source of each kind, and of each form of a muMoE layer's tensor."""


def alone(pair: Pair) -> Row:
    """A row of a pair in which, as far as the registries tell, nothing else is refused."""
    given = dict(pair)
    best = {**PLAIN, **given}
    for source, precision, target in product(
        (best["source"], *SMALL), ("fp32", "int8"), ("ort-cpu", "onnx", "tensorrt")
    ):
        row = {**PLAIN, "source": source, "precision": precision, "target": target, **given}
        if not conflict(row):
            return row
    return best


def commit(form: str) -> str:
    """The commit in a format of git's; the same one where there is no git."""
    try:
        done = subprocess.run(
            ("git", "log", "-1", f"--format={form}", "--date=short"),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "2026-01-01"
    return done.stdout.strip()
