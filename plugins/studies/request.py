"""What is asked of experts: options of `bench`, `export` and `specialise`. Loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.option import Panel, Request, option
from ...errors import UsageError
from ...exporter.requests import AnyPath

API = 1


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What a benchmark finds out about experts and subgroups."""

    analysis: str = option(
        "",
        "Analyse the experts, a list: retention, random, subsets, shares, or all; needs labels.",
        unset="none",
    )
    max_subsets: int | None = option(
        None, "Try at most this many sets of experts in an analysis.", unset="all", min=1
    )
    group_by: str | None = option(
        None,
        "Compare subgroups: an array of the .npz with the labels.",
        unset="none",
        metavar="ARRAY",
    )


PANEL = Panel("studies", "Experts", ("bench",), StudyOptions)


@dataclass(frozen=True, kw_only=True)
class EditOptions:
    """Which experts an export removes, re-writes or steers by (`edits.py`)."""

    ablate: str | Sequence[str] = option(
        (),
        "Experts to remove, counted from 0: LAYER:EXPERT or LAYER:3,5.",
        unset="none",
        kind=list[str],
        metavar="LAYER:EXPERT",
    )
    rewrite: AnyPath | Sequence[Mapping[str, Any]] | None = option(
        None,
        "Outputs of muMoE layers to rewrite: a JSON file, or its entries.",
        unset="none",
        kind=Path,
        metavar="FILE",
    )
    steer: str | Sequence[str] = option(
        (),
        "Move every token of a muMoE layer towards an expert; --steer input makes the strengths an "
        "input of the graph.",
        unset="none",
        kind=list[str],
        metavar="LAYER:EXPERT[:STRENGTH]",
    )


EDITS = Panel("edits", "Edits", ("export",), EditOptions, rare=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialiseRequest(Request):
    """Whose experts are removed, which subgroups are compared, and a rewriting for one of them."""

    layer: str | None = option(
        None, "The layer whose experts to remove.", unset="the last", metavar="NAME"
    )
    group_by: str | Sequence[int | bool | str] | None = option(
        None,
        "Compare subgroups: an array of the data, or the subgroup of each input.",
        unset="none; mean coefficients by class",
        heading="Subgroups",
        metavar="ARRAY",
    )
    rewrite_class: int | None = option(
        None, "Write a rewrite.json for this class's output.", unset="none", metavar="CLASS"
    )
    rewrite_group: int | bool | str | None = option(
        None, "The subgroup that the rewrite helps.", unset="none", metavar="GROUP"
    )
    strength: float | None = option(
        None,
        "The size of the rewrite; its sign follows from the wrong answers.",
        unset="the best max-min",
        metavar="λ",
    )
    budget: float | None = option(
        None,
        "The share of the accuracy that the search for it may cost.",
        unset="0.01",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        """Raises `UsageError` for parts of a rewriting without the whole."""
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
                        f"{spelling}: a rewriting needs --rewrite-class and --rewrite-group",
                        hint=f"leave {spelling} out, or give both",
                    )
        if self.strength is not None and self.budget is not None:
            raise UsageError(
                "--budget with --strength: nothing is searched for", hint="leave one of them out"
            )
