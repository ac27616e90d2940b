"""How fairly subgroups are treated, as tables: in what `specialise` prints, and in a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.text import table
from .fairness import ClassFairness, Fairness, ModelFairness, Rewriting

FAIR_HEADS = (
    *("class", "subgroup", "its accuracy", "equality of opportunity", "std. bias", "max-min"),
    "accuracy",
)


def fairness_text(result: Fairness) -> str:
    """Returns a row per class, of the subgroup with its lowest accuracy; with 95% intervals."""
    rows = [fair_row(str(decided.output), decided) for decided in result.classes]
    undefined = [str(decided.output) for decided in result.classes if decided.undefined]
    lines = [
        "Each class against all others, in the subgroup with the lowest accuracy (95% intervals):",
        table(FAIR_HEADS, rows),
    ]
    if undefined:
        lines.append(
            "equality of opportunity is not defined where the subgroup, or all others, hold no "
            f"input of the class: {', '.join(undefined)}"
        )
    return "\n".join(lines)


def fair_row(first: str, decided: ClassFairness) -> tuple[str, ...]:
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
    """Returns what a rewriting does, beside the model without it."""
    output, budget = rewriting.output, rewriting.budget
    how = ""
    if budget is not None:
        how = f" (the best of {rewriting.tried} for {budget:.1%} of the accuracy at most)"
    rows = [fair_row("as trained", rewriting.before), fair_row("rewritten", rewriting.after)]
    before, after = rewriting.accuracy_before, rewriting.accuracy_after
    return "\n".join(
        (
            f"Output {output} of {rewriting.layer} += {rewriting.strength:g}·āᵀa for subgroup "
            f"{rewriting.group}{how}:",
            table((f"class {output}", *FAIR_HEADS[1:]), rows),
            f"all classes: {before} as trained, {after} rewritten",
        )
    )


def compared_rows(model: ModelFairness) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields rows under `FAIR_HEADS`, each with its class: as trained, and edited if it is.

    Of an edited model the classes whose outputs are rewritten, else every class.
    """
    for output in model.rewritten or range(len(model.untouched.classes)):
        yield str(output), fair_row("as trained", model.untouched.classes[output])
        if model.edited is not None:
            yield str(output), fair_row("edited", model.edited.classes[output])


def subgroups_text(models: Sequence[ModelFairness]) -> str:
    """Returns a table per model, and its accuracy over all classes; empty for no models."""
    blocks = []
    for model in models:
        rows = [(output, *row) for output, row in compared_rows(model)]
        whole = f"all classes: {model.untouched.accuracy} as trained"
        if model.edited is not None:
            whole += f", {model.edited.accuracy} edited"
        blocks.append(
            f"{model.model}, subgroups by {model.group_by}, k = {model.k}\n"
            f"{table(('class', '', *FAIR_HEADS[1:]), rows)}\n{whole}"
        )
    return "\n\n".join(blocks)
