"""Formats the fairness of models as tables, for `specialise` and for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.text import table
from .fairness import ClassFairness, Fairness, ModelFairness, Rewriting

COLUMNS = (
    "subgroup",
    "its accuracy",
    "equality of opportunity",
    "std. bias",
    "max-min",
    "accuracy",
)


def fairness_text(result: Fairness) -> str:
    """Returns a table of each class in its subgroup with the lowest accuracy."""
    what = "attribute" if result.attributes else "class"
    rows = [table_row(str(decided.output), decided) for decided in result.classes]
    undefined = [str(decided.output) for decided in result.classes if decided.undefined]
    lines = [
        f"{'Each attribute' if result.attributes else 'Each class against all others'}, in the "
        "subgroup with the lowest accuracy (95% intervals):",
        table((what, *COLUMNS), rows),
    ]
    if undefined:
        lines.append(
            "equality of opportunity is not defined, because the subgroup or its complement has no "
            f"input {'with the attribute' if result.attributes else 'of the class'}: "
            f"{', '.join(undefined)}"
        )
    return "\n".join(lines)


def table_row(first: str, decided: ClassFairness) -> tuple[str, ...]:
    opportunity = decided.equality_of_opportunity
    return (
        first,
        str(decided.target),
        str(decided.target_accuracy),
        "not defined" if opportunity is None else str(opportunity),
        str(decided.std_bias),
        str(decided.max_min),
        str(decided.accuracy),
    )


def rewriting_text(rewriting: Rewriting) -> str:
    """Returns the effect of a rewrite, compared with the model as trained."""
    output, budget = rewriting.output, rewriting.budget
    how = ""
    if budget is not None:
        how = f" (the best of {rewriting.tried} that cost at most {budget:.1%} of the accuracy)"
    rows = [table_row("as trained", rewriting.before), table_row("rewritten", rewriting.after)]
    before, after = rewriting.accuracy_before, rewriting.accuracy_after
    what = "attribute" if rewriting.attributes else "class"
    threshold = rewriting.threshold
    blind = "blind threshold: no constant improves the lowest accuracy of a subgroup"
    totals = f"{before} as trained, {after} rewritten"
    if threshold is not None:
        rows.append(table_row("blind threshold", threshold.after))
        blind = (
            f"blind threshold: output {output} += {threshold.value:g} for every input (the best of "
            f"{threshold.tried})"
        )
        totals += f", {threshold.accuracy_after} with the blind threshold"
    return "\n".join(
        (
            f"Output {output} of {rewriting.layer} += {rewriting.strength:g}·āᵀa for subgroup "
            f"{rewriting.group}{how}:",
            table((f"{what} {output}", *COLUMNS), rows),
            blind,
            f"{'mean of all attributes' if rewriting.attributes else 'all classes'}: {totals}",
        )
    )


def compared_rows(model: ModelFairness) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each class with its rows for `COLUMNS`: as trained and, with edits, as edited.

    A model with rewritten outputs has rows for their classes only, other models for all classes.
    """
    for output in model.rewritten or range(len(model.untouched.classes)):
        yield str(output), table_row("as trained", model.untouched.classes[output])
        if model.edited is not None:
            yield str(output), table_row("edited", model.edited.classes[output])


def subgroups_text(models: Sequence[ModelFairness]) -> str:
    """Returns a table for each model, followed by its accuracy over all classes."""
    blocks = []
    for model in models:
        rows = [(output, *row) for output, row in compared_rows(model)]
        attributes = model.untouched.attributes
        scope = "mean of all attributes" if attributes else "all classes"
        totals = f"{scope}: {model.untouched.accuracy} as trained"
        if model.edited is not None:
            totals += f", {model.edited.accuracy} edited"
        blocks.append(
            f"{model.model}, subgroups by {model.group_by}, k = {model.k}\n"
            f"{table(('attribute' if attributes else 'class', '', *COLUMNS), rows)}\n{totals}"
        )
    return "\n\n".join(blocks)
