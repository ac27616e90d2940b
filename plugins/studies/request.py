"""The options of `bench`, `export` and `specialise` for experts. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.option import Panel, Request, at_least, option
from ...common.text import near_miss, split_list
from ...errors import UsageError
from ...exporter.requests import AnyPath
from ...graphs.k import K, parse_k

API = 1


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of a benchmark for studies of experts and subgroups."""

    analysis: str = option(
        "",
        "Analyse the experts: all, or any of retention, random, subsets, shares; needs labels.",
        unset="none",
    )
    max_subsets: int | None = option(
        None, "Try at most this many sets of experts in an analysis.", unset="all"
    )
    group_by: str | None = option(
        None, "Compare subgroups: the name of an array in the .npz with the labels.", unset="none"
    )


PANEL = Panel(
    "studies", "Experts", ("bench",), StudyOptions, "moexport.plugins.studies.cli:study_options"
)

NAMES = ("retention", "random", "subsets", "shares")

SUBSETS_BY_SUMS, SUBSETS_BY_PASSES = 50_000, 200


@dataclass(frozen=True, slots=True)
class Analyses:
    """The analyses to make, and their limits.

    `max_subsets` is the limit of C(n, k) for `subsets`; None means 50,000 if the scores are sums
    over experts, or 200 if every subset takes a pass over the data.
    """

    names: tuple[str, ...] = NAMES
    seeds: int = 10
    max_subsets: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in NAMES]
        if unknown:
            raise UsageError(
                f"--analysis {unknown[0]}: there is no such analysis",
                hint=near_miss(unknown[0], (*NAMES, "all")),
            )
        if self.seeds < 2:
            raise UsageError(
                f"{self.seeds} seeds: a standard deviation needs at least two",
                hint="the paper uses 10",
            )


def parse_analyses(text: str) -> tuple[str, ...]:
    """Parses `--analysis`: a list, or `all`; raises `UsageError` for unknown analyses."""
    names = tuple(dict.fromkeys(split_list(text)))
    if not names:
        raise UsageError("--analysis: the list is empty", hint=f"choose from {', '.join(NAMES)}")
    return NAMES if names == ("all",) else Analyses(names).names


def requested(options: StudyOptions) -> Analyses:
    """Returns the requested analyses; raises `UsageError` for invalid options."""
    limit = options.max_subsets
    names = parse_analyses(options.analysis) if options.analysis else ()
    if limit is not None and "subsets" not in names:
        raise UsageError(
            f"--max-subsets {limit}: no subsets are tried", hint="add --analysis subsets"
        )
    return Analyses(names, max_subsets=limit)


@dataclass(frozen=True, kw_only=True)
class EditOptions:
    """The edits of an export, which `edits.py` parses: ablations, rewrites and steering."""

    ablate: str | Sequence[str] = option(
        (), "Experts to remove, counted from 0: LAYER:3 or LAYER:3,5.", unset="none"
    )
    rewrite: AnyPath | Sequence[Mapping[str, Any]] | None = option(
        None,
        "Outputs of muMoE layers to rewrite: a JSON file or, in Python, its entries.",
        unset="none",
        is_path=True,
    )
    steer: str | Sequence[str] = option(
        (),
        "Move every token of a muMoE layer towards an expert; --steer input makes the strengths an "
        "input of the graph.",
        unset="none",
    )


EDITS = Panel(
    "edits",
    "Edits",
    ("export",),
    EditOptions,
    "moexport.plugins.studies.cli:edit_options",
    rare=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialiseRequest(Request):
    """The options of `specialise`."""

    layer: str | None = option(None, "The layer whose experts are removed.", unset="the last")
    k: K | None = option(
        None,
        "The k at which choices are counted: 4, 0.25, n/4, or one for each layer.",
        unset="the k of training",
    )
    group_by: str | Sequence[int | bool | str] | None = option(
        None,
        "Compare subgroups: the name of an array in the data or, in Python, each input's subgroup.",
        unset="none; mean coefficients are by class",
    )
    examples: int | None = option(
        None,
        "How many examples of each expert to show in examples.html; needs no labels.",
        unset="none",
    )
    rewrite_class: int | None = option(
        None, "Write a rewrite.json for the output of this class.", unset="none"
    )
    rewrite_group: int | bool | str | None = option(
        None, "The subgroup that the rewrite helps.", unset="none"
    )
    strength: float | None = option(
        None,
        "The size of the rewrite; its sign follows from the wrong answers.",
        unset="the best max-min",
    )
    budget: float | None = option(
        None, "The share of the accuracy that the rewrite may cost.", unset="0.01"
    )

    def __post_init__(self) -> None:
        """Raises `UsageError` for invalid or incomplete options."""
        at_least(self, "examples", 1)
        if self.k is not None and parse_k(self.k) == "input":
            raise UsageError(
                "--k input: experts are counted at one k", hint="use a number or a share: --k 4"
            )
        if self.rewrite_class is None or self.rewrite_group is None:
            parts = {
                "--rewrite-class": self.rewrite_class,
                "--rewrite-group": self.rewrite_group,
                "--strength": self.strength,
                "--budget": self.budget,
            }
            for spelling, value in parts.items():
                if value is not None:
                    raise UsageError(
                        f"{spelling}: a rewrite needs --rewrite-class and --rewrite-group",
                        hint=f"leave {spelling} out, or give both of these options",
                    )
        if self.rewrite_class is not None and self.group_by is None:
            raise UsageError(
                f"--rewrite-class {self.rewrite_class}: subgroups are needed, but none are given",
                hint="name the array with the subgroups: --group-by ARRAY",
            )
        if self.strength is not None and self.budget is not None:
            raise UsageError(
                "--budget is for the search for a strength, but --strength is given",
                hint="leave one of them out",
            )
        if self.strength is not None and not 0 < abs(self.strength) < math.inf:
            raise UsageError(
                f"--strength {self.strength}: a finite number other than 0 is expected",
                hint="the sign is ignored: it follows from the wrong answers",
            )
        if self.budget is not None and not 0 <= self.budget < 1:
            raise UsageError(
                f"--budget {self.budget}: a share of at least 0 and below 1 is expected",
                hint="with --budget 0.01, a rewrite may cost one in a hundred correct answers",
            )
