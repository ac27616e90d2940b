"""The part of a report on each output: the accuracy of attributes, and the R² of a regression."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.text import table
from ..results import Results, Row
from .content import SectionContent, TableContent

NOTE = (
    "An attribute is predicted by the sign of its logit; positives are the inputs that have it. R² "
    "is 1 for outputs without error, and 0 if they are no better than the mean of the targets. "
    "Each column is a k."
)


def _by_k(results: Results) -> Iterator[tuple[str, dict[int, Row], Row]]:
    """Yields a model and precision with its rows by k, and the untouched model's row."""
    for model in dict.fromkeys(row.model for row in results.rows):
        scored = [
            row
            for row in results.of_model(model)
            if row.error is None
            if row.regression is not None or (row.accuracy and row.accuracy.attributes)
        ]
        untouched = next((row for row in scored if row.is_reference), None)
        if untouched is None:
            continue
        graphs = [row for row in scored if not row.engine.startswith("pytorch")]
        for precision in dict.fromkeys(row.precision for row in graphs):
            rows: dict[int, Row] = {}
            for row in graphs:
                if row.precision == precision:  # neither engine nor batch size changes quality
                    rows.setdefault(row.k, row)
            yield f"{model}, {precision.upper()}", rows, untouched


def tables(results: Results) -> Iterator[TableContent]:
    """Yields a table for each model and precision: a row per output, a column per k."""
    for title, rows, untouched in _by_k(results):
        ks = sorted(rows, reverse=True)
        columns = (untouched, *(rows[k] for k in ks))
        k_heads = [f"k = {k}" for k in ks]
        lines: list[Sequence[str]] = []
        if untouched.accuracy is not None:
            heads = ("Attribute", "Positives", "PyTorch", *k_heads)
            for index, attribute in enumerate(untouched.accuracy.attributes):
                found = (row.accuracy.attributes[index] for row in columns if row.accuracy)
                shares = (f"{each.accuracy:.1%}" for each in found)
                lines.append((str(index), f"{attribute.positives:,}", *shares))
            means = (f"{row.accuracy.top1:.1%}" for row in columns if row.accuracy)
            lines.append(("mean", "", *means))
        else:
            heads = ("Output", "Figure", "PyTorch", *k_heads)
            found_r2 = [row.regression for row in columns if row.regression]
            for index in range(len(found_r2[0].outputs)):
                values = (each.outputs[index] for each in found_r2)
                shown = ("not defined" if value is None else f"{value:.4f}" for value in values)
                lines.append((str(index), "R²", *shown))
            lines.append(("all", "R²", *(f"{each.r2:.4f}" for each in found_r2)))
            lines.append(("all", "RMSE", *(f"{each.rmse:.4g}" for each in found_r2)))
            lines.append(("all", "MAE", *(f"{each.mae:.4g}" for each in found_r2)))
        yield TableContent("", heads, {title: lines})


def outputs_section(results: Results) -> SectionContent | None:
    """Returns the tables of a report; None if the labels are classes."""
    found = tuple(tables(results))
    return SectionContent(tables=found, notes=(NOTE,)) if found else None


def outputs_text(results: Results) -> str:
    """Returns the tables for the terminal; empty if the labels are classes."""
    blocks = [
        f"{title}\n{table(content.heads, rows)}"
        for content in tables(results)
        for title, rows in content.groups.items()
    ]
    return "\n\n".join(blocks)
