"""What is listed in a registry of the code is listed in the documents, and nothing else."""

from __future__ import annotations

import tomllib

import moexport
import pytest
from moexport.bench.engines import KINDS
from moexport.bench.request import BenchRequest
from moexport.common.option import declared
from moexport.exporter.families import FAMILIES
from moexport.graphs.targets import TARGETS
from moexport.tests.docs.documents import ROOT, named_in_tables


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(text: str, heading: str) -> set[str]:
    """The names in code that begin the rows of the table with this heading."""
    (found,) = [part for part in text.split("\n\n") if part.startswith(f"| {heading} |")]
    return {name for names, _ in named_in_tables(found.partition("\n")[2]) for name in names}


def test_the_readme_lists_every_family() -> None:
    assert table(page("README.md"), "family") == {*FAMILIES.names}


@pytest.mark.parametrize("name", FAMILIES.names)
def test_a_page_describes_every_family(name: str) -> None:
    assert f"`{name}`" in page("docs/families.md") + page("docs/mumoe.md")


def test_the_readme_lists_every_target() -> None:
    assert table(page("README.md"), "`--target`") == {*TARGETS.names}


def test_the_pages_list_every_engine_of_bench() -> None:
    pages = (page("docs/bench.md"), page("docs/token-routed.md"))
    assert set.union(*(table(text, "engine") for text in pages)) == KINDS.keys()


def test_the_help_of_bench_lists_every_engine() -> None:
    _, said = declared(BenchRequest)["engine"]
    assert said.help == f"A list of {', '.join(KINDS)}; or all."


def test_doctor_has_the_lines_of_every_engine() -> None:
    told = {each.name: each for each in moexport.doctor().abilities}
    for kind in KINDS.values():
        assert kind.requires
        lines = [told[each.name] for each in kind.requires]
        absent = next((line.detail for line in lines if not line.available), None)
        assert kind.missing() == absent


def test_what_installs_an_engine_is_an_extra() -> None:
    project = tomllib.loads(page("pyproject.toml"))["project"]
    needed = {kind.extra for kind in KINDS.values() if kind.extra is not None}
    assert needed <= project["optional-dependencies"].keys()
