"""Generates tables of the pages from the registries, so a new record needs no edit of a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moexport.bench.engines import KINDS as ENGINES
from moexport.common.text import markdown
from moexport.exporter.bundle.runtimes import RUNTIMES
from moexport.exporter.families import FAMILIES
from moexport.graphs.lowerings import KINDS
from moexport.graphs.targets import TARGETS, Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8", "int4", "fp8")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return f"{markdown(header, rows)}\n"


def targets() -> str:
    """Returns every target: what runs its graphs, their ops, and their precisions."""
    rows = []
    for each in TARGETS:
        precisions = ", ".join(name for name in PRECISIONS if name not in each.refused)
        ops = "standard" if each.standard_ops else "standard, ONNX Runtime's own"
        rows.append(
            (f"`{each.name}`", each.summary or RUNTIMES[each.runtime].title, ops, precisions)
        )
    return _table(("`--target`", "runs in", "ops", "`--precision`"), rows)


def lowerings() -> str:
    """Returns every lowering of every kind of layer, its targets and its summary."""
    rows = []
    for kind in KINDS:
        for each in kind.lowerings:
            names = [f"`{name}`" for name in TARGETS.names if name in each.targets]
            served = "all" if len(names) == len(TARGETS.names) else ", ".join(names)
            rows.append((f"`{kind.name}`", f"`{each.name}`", served, each.summary))
    return _table(("layers", "lowering", "targets", "what it does"), rows)


def engines() -> str:
    """Returns every engine of `bench`, the title of its rows, and the extra that installs it."""
    rows = [
        (f"`{name}`", kind.title, f"`{kind.extra}`" if kind.extra else "–")
        for name, kind in ENGINES.items()
    ]
    return _table(("engine", "title", "extra"), rows)


def families() -> str:
    """Returns every family with its description."""
    return _table(("family", "model"), [(f"`{each.name}`", each.summary) for each in FAMILIES])


LISTED: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"targets": targets, "families": families},
    "docs/deploy.md": {"targets": targets},
    "docs/lowerings.md": {"lowerings": lowerings},
    "docs/bench.md": {"engines": engines},
}
"""The tables of each page by its markers, `<!-- targets -->` and `<!-- /targets -->`."""
