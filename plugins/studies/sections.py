"""Registers the report's sections on experts and subgroups."""

from __future__ import annotations

from collections.abc import Sequence

from ...bench.report.content import Cell, ReportSection, SectionContent, TableContent
from ...bench.results import Results
from .fairness import SUBGROUPS as OF_SUBGROUPS
from .fairness import compared_in
from .fairness_report import COLUMNS, compared_rows, subgroups_text
from .findings import EXPERTS as OF_EXPERTS
from .findings import studies_in
from .report import figures, text, titled_tables

API = 1

NOTE = (
    "Random experts are drawn for each input and layer, once per seed; σ is the sample standard "
    "deviation over the seeds. The best set per input was found with its label, the best for all "
    "with all labels; distinct best is the number of sets with the smallest loss for at least one "
    "input. Shares are means over inputs."
)


def _experts(results: Results) -> SectionContent | None:
    studies = studies_in(results.analyses)
    tables = []
    for title, (header, rows) in titled_tables(studies).items():
        groups: dict[str, list[Sequence[Cell]]] = {}
        for model, *cells in rows:
            groups.setdefault(model, []).append(cells)
        if groups:
            tables.append(TableContent(title, header[1:], groups))
    return SectionContent(tables=tuple(tables), notes=(NOTE,)) if studies else None


def _subgroups(results: Results) -> SectionContent | None:
    groups: dict[str, list[Sequence[Cell]]] = {}
    for model in compared_in(results.analyses):
        for output, row in compared_rows(model):
            label = "attribute" if model.untouched.attributes else "class"
            groups.setdefault(f"{model.model}, {label} {output}", []).append(row)
    heads = ("Model", *(f"{head[0].upper()}{head[1:]}" for head in COLUMNS))
    note = "Each attribute, or each class against all others, in PyTorch; 95% intervals."
    if not groups:
        return None
    return SectionContent(tables=(TableContent("", heads, groups),), notes=(note,))


EXPERTS = ReportSection(
    name="experts",
    title="Which experts",
    place=70,
    content=_experts,
    shows=OF_EXPERTS,
    text=lambda results: text(studies_in(results.analyses)),
    figures=lambda results, directory: figures(studies_in(results.analyses), directory),
)

SUBGROUPS = ReportSection(
    name="subgroups",
    title="Subgroups",
    place=80,
    content=_subgroups,
    shows=OF_SUBGROUPS,
    text=lambda results: subgroups_text(compared_in(results.analyses)),
)
