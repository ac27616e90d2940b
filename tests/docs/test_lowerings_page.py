"""The page on lowerings shows the graphs that are really written, and every lowering there is."""

from __future__ import annotations

import pytest
from moexport.docs.refresh import listed_ops
from moexport.graphs.layers.base import Kind
from moexport.graphs.lowerings import KINDS, lowerings_of
from moexport.graphs.targets import TARGETS
from moexport.tests.docs.documents import ROOT, named_in_tables

PAGE = (ROOT / "docs" / "lowerings.md").read_text(encoding="utf-8")
SECTIONS: dict[Kind, str] = {
    "soft-moe": "## Targets and layers",
    "experts": "## Token-routed experts",
    "mumoe": "## muMoE layers",
}


def section(kind: Kind) -> str:
    return PAGE.partition(f"{SECTIONS[kind]}\n")[2].partition("\n## ")[0]


def test_the_page_lists_the_ops_of_every_lowering() -> None:
    listings = listed_ops()
    assert listings.keys() == {"route", *lowerings_of("soft-moe")}
    for name, ops in listings.items():
        listing = f"### {name}\n\n```text\n{ops}```\n"
        assert listing in PAGE, (
            f"`python docs/refresh.py lowerings` brings it up to date: {listing}"
        )


@pytest.mark.parametrize(
    ("kind", "name"), [(kind.name, record.name) for kind in KINDS for record in kind.lowerings]
)
def test_the_page_names_every_lowering_of_every_kind(kind: Kind, name: str) -> None:
    assert f"`{name}`" in section(kind)


@pytest.mark.parametrize("kind", ["soft-moe", "experts"])
def test_the_tables_of_lowerings_have_their_targets(kind: Kind) -> None:
    told = {
        name: {*TARGETS.names} if cells[1] == "all" else {*cells[1].replace("`", "").split(", ")}
        for names, cells in named_in_tables(section(kind))
        for name in names
    }
    assert told == {name: {*record.targets} for name, record in lowerings_of(kind).items()}
