"""How fairly subgroups are treated, as tables: in what `specialise` prints, and in a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.text import table
from ..fairness import ClassFairness, Fairness, ModelFairness, Rewriting

FAIR_HEADS = (
    *("class", "subgroup", "its accuracy", "equality of opportunity", "std. bias", "max-min"),
    "accuracy",
)


def fairness_text(found: Fairness) -> str:
    """Returns a row per class, of the subgroup with its lowest accuracy; with 95% intervals."""
    rows = [fair_row(str(each.output), each) for each in found.classes]
    undefined = [str(each.output) for each in found.classes if each.undefined]
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


def fair_row(first: str, each: ClassFairness) -> tuple[str, ...]:
    opportunity = each.equality_of_opportunity
    return (
        first,
        str(each.target),
        str(each.target_accuracy),
        "not defined" if opportunity is None else str(opportunity),
        str(each.std_bias),
        str(each.max_min),
        str(each.accuracy),
    )


def rewriting_text(found: Rewriting) -> str:
    """Returns what a rewriting does, beside the model without it."""
    how = f"the best of {found.tried} for {found.budget:.1%} of the accuracy at most"
    rows = [fair_row("as trained", found.before), fair_row("rewritten", found.after)]
    return "\n".join(
        (
            f"Output {found.output} of {found.layer} += {found.strength:g}·āᵀa for subgroup "
            f"{found.group}" + (f" ({how})" if found.budget is not None else "") + ":",
            table((f"class {found.output}", *FAIR_HEADS[1:]), rows),
            f"all classes: {found.accuracy_before} as trained, {found.accuracy_after} rewritten",
        )
    )


def compared_rows(each: ModelFairness) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields rows under `FAIR_HEADS`, each with its class: as trained, and edited if it is.

    Of an edited model the classes whose outputs are rewritten, else every class.
    """
    for output in each.rewritten or range(len(each.untouched.classes)):
        yield str(output), fair_row("as trained", each.untouched.classes[output])
        if each.edited is not None:
            yield str(output), fair_row("edited", each.edited.classes[output])


def subgroups_text(found: Sequence[ModelFairness]) -> str:
    """Returns a table per model, and its accuracy over all classes; empty for no models."""
    blocks = []
    for each in found:
        rows = [(output, *row) for output, row in compared_rows(each)]
        whole = f"all classes: {each.untouched.accuracy} as trained"
        if each.edited is not None:
            whole += f", {each.edited.accuracy} edited"
        blocks.append(
            f"{each.model}, subgroups by {each.group_by}, k = {each.k}\n"
            f"{table(('class', '', *FAIR_HEADS[1:]), rows)}\n{whole}"
        )
    return "\n\n".join(blocks)
