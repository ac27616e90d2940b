"""What is in a registry of the code is described, installed and found where users look."""

from __future__ import annotations

import tomllib

import moexport
import pytest
from moexport.bench.engines import KINDS
from moexport.bench.request import BenchRequest
from moexport.common.option import declared
from moexport.docs.sources import ROOT
from moexport.exporter.families import FAMILIES


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FAMILIES.names)
def test_a_page_describes_every_family(name: str) -> None:
    assert f"`{name}`" in page("docs/families.md") + page("docs/mumoe.md")


def test_the_help_of_bench_lists_every_engine() -> None:
    _, said = declared(BenchRequest)["engine"]
    assert said.help == f"A list of engines, or all: {', '.join(KINDS)}."


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
