"""What studies find and how a report shows it come from plugins: the benchmark knows none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moexport.bench.report.page import html, payload
from moexport.bench.report.sections import all_sections, contents
from moexport.bench.report.text import rows_table, to_markdown
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, from_json, to_json
from moexport.bench.studies import STUDIES, requested_studies
from moexport.common.option import requested

THEIRS = """
from moexport.bench.report.content import ReportSection, SectionContent, TableContent
from dataclasses import dataclass
from typing import Annotated
from moexport.commands.options import option_for
from moexport.bench.studies import Study, StudyRun
from moexport.common.option import option
from moexport.common.option import Panel

API = 1


def begin(candidates, data, request):
    return StudyRun(lambda: {"answer": 42})


def content(results):
    groups = {"all": [(str(results.analyses["mine"]["answer"]),)]}
    return SectionContent(tables=(TableContent("", ("Answer",), groups),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    answer: bool = option(False, "Find the answer.")


def typed(answer: Annotated[bool, option_for(Options, "answer")] = False):
    return Options(answer=answer)


PANEL = Panel("mine", "Mine", ("bench",), Options, "theirs:typed")
STUDY = Study(
    "mine", lambda request: request.asked(Options).answer, lambda request, listed: None, begin
)
SECTION = ReportSection(
    name="mine",
    title="Mine",
    place=1,
    content=content,
    shows="mine",
    text=lambda results: "the answer is 42",
)
"""

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from moexport.bench.data import LabelledData
from moexport.bench.report.page import payload
from moexport.bench.report.text import rows_table, to_markdown
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, read, to_json
from moexport.bench.studies import begin_studies, check_studies
from moexport.common.option import requested

def refused(**options):
    try:
        check_studies(requested(BenchRequest, options))
    except TypeError as error:
        return str(error)

results = read(Path(sys.argv[1]))
data = LabelledData(np.zeros((1, 1), np.float32), None)
runs = {}
if len(sys.argv) > 2:
    runs = begin_studies([], data, requested(BenchRequest, {"answer": True}))
shown = Results((), (), analyses={name: run.findings() for name, run in runs.items()
                                  if name == "mine"})
print(json.dumps({
    "none": refused(),
    "refused": [refused(analysis="all"), refused(scenario="offline"),
                refused(group_by="x", data="x.npz")],
    "kept": json.loads(to_json(results)).get("analyses"),
    "markdown": to_markdown(results),
    "runs": list(runs),
    "theirs": [rows_table(shown), payload(shown)["tables"]],
    "plugins": sorted(name for name in sys.modules if name.startswith("moexport.plugins.")),
}))
"""


def outcome(results: Results, folder: Path, *words: str, **environment: str) -> dict[str, Any]:
    """What the program prints of a results file, in a process of its own."""
    file = folder / "results.json"
    file.write_text(to_json(results), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, file, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def installed(folder: Path, module: str) -> str:
    """Installs somebody else's study and section; returns PYTHONPATH."""
    (folder / "theirs.py").write_text(module)
    info = folder / "theirs-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[moexport.studies]\nmine = theirs:STUDY\n[moexport.sections]\nmine = theirs:SECTION\n"
        "[moexport.options]\nmine = theirs:PANEL\n"
    )
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])


def test_without_plugins_their_options_are_refused(results: Results, tmp_path: Path) -> None:
    searched = replace(results, analyses={"tuning": {"keep": 0.9}})
    found = outcome(searched, tmp_path, MOEXPORT_PLUGINS="off")
    assert found["none"] is None
    for refused, option in zip(found["refused"], ("analysis", "scenario", "group_by"), strict=True):
        assert refused.startswith(f"{option}: there is no such option; ")
        assert refused.endswith("MOEXPORT_PLUGINS=off disables all plugins")
    # What a search had found stays in the file, and the report says that it is not shown.
    assert found["kept"] == {"tuning": {"keep": 0.9}}
    assert "Left out: tuning." in found["markdown"]
    assert found["plugins"] == []


def test_what_another_package_finds_is_shown(results: Results, tmp_path: Path) -> None:
    found = outcome(results, tmp_path, "begin", PYTHONPATH=installed(tmp_path, THEIRS))
    assert "mine" in found["runs"]
    text, (table, *_) = found["theirs"]
    assert text == "the answer is 42"
    assert (table["id"], table["tables"][0]["groups"]) == ("mine", {"all": [["42"]]})


def test_a_section_of_another_api_is_left_out_with_a_sentence(
    results: Results, tmp_path: Path
) -> None:
    old = installed(tmp_path, THEIRS.replace("API = 1", "API = 0"))
    found = outcome(replace(results, analyses={"mine": 1}), tmp_path, PYTHONPATH=old)
    assert "Left out: mine." in found["markdown"]
    assert found["kept"] == {"mine": 1}


def test_findings_that_nothing_shows_stay_and_are_named(results: Results) -> None:
    again = from_json(to_json(replace(results, analyses={"nobody\x1b": {"a": 1}})))
    assert again.analyses == {"nobody\x1b": {"a": 1}}
    sentence = "Left out: nobody\\u001b. No installed plugin shows these findings"
    assert sentence in rows_table(again)
    assert any(sentence in line for line in payload(again)["method"])
    assert "Left out" not in to_markdown(results)
    assert [each.name for each, _ in contents(again, None)] == ["parity"]
    assert "nobody" in html(again)


def test_studies_are_asked_for_by_options_of_plugins() -> None:
    options = {"analysis": "all", "group_by": "group", "scenario": "offline"}
    request = requested(BenchRequest, options)
    assert [study.name for study in requested_studies(request)] == [
        "experts",
        "service",
        "subgroups",
    ]
    assert requested_studies(BenchRequest(k="4", samples=3)) == []


def test_sections_have_places_of_their_own() -> None:
    places = [section.place for section in all_sections()]
    assert places == sorted(set(places))


@pytest.mark.parametrize("name", ["experts", "subgroups", "service"])
def test_a_study_and_its_section_have_one_name(name: str) -> None:
    assert STUDIES[name].name in {section.shows for section in all_sections()}
