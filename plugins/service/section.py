"""Registers the report's section on services."""

from __future__ import annotations

from pathlib import Path

from ...bench.report.content import PageChart, ReportSection, SectionContent, TableContent
from ...bench.results import Results
from .charts import service_figure, service_points
from .findings import SERVICE, services_in
from .report import answers, service_notes, service_tables, service_text

API = 1


def _service(results: Results) -> SectionContent | None:
    findings = services_in(results.analyses)
    if findings is None:
        return None
    return SectionContent(
        tables=tuple(TableContent(*table) for table in service_tables(results)),
        intro=tuple(answers(results)),
        notes=service_notes(findings),
    )


SECTION = ReportSection(
    name="service",
    title="In service",
    place=40,
    content=_service,
    shows=SERVICE,
    text=service_text,
    figures=service_figure,
    chart=PageChart(service_points, Path(__file__).parent / "assets"),
)
