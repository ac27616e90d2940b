"""What the command line prints is aligned, short and in the right stream."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from moexport.common.console import Console, show
from moexport.common.text import count, csv_cell, lines, markdown_text, printable, size, table
from moexport.tests.terminal import Screen


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (318_200, "318K"),
        (5.13e7, "51.3M"),
        (2.318e9, "2.32B"),
        (2.273e9, "2.27B"),
        (9_996, "10.0K"),
        (999_600, "1.00M"),
        (2.3e12, "2.30T"),
    ],
)
def test_counts_have_one_decimal_and_a_magnitude(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 B"), (12_300, "12.3 kB"), (2.05e9, "2.0 GB"), (0, "0 B")]
)
def test_sizes_have_a_unit(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_tables_put_numbers_to_the_right_and_words_to_the_left() -> None:
    text = table(("name", "n"), [("blocks.6.mlp", 8), ("x", 128)])
    assert text.splitlines() == ["name            n", "blocks.6.mlp    8", "x             128"]


def test_a_table_without_rows_is_its_header() -> None:
    assert table(("a", "bc"), []) == "a  bc"


def test_steps_notes_and_errors_go_to_stderr_one_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Console() as console:
        console.step("tracing")
        console.step("writing", total=10)
        console.advance(10)
        console.note("a default was taken")
        console.error("bad", "do this")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "moexport: tracing",
        "moexport: writing",
        "note: a default was taken",
        "error: bad",
        "hint: do this",
    ]


def test_quiet_leaves_errors_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.step("tracing")
    console.note("x")
    console.error("bad")
    assert capsys.readouterr().err == "error: bad\n"


def test_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Console() as console:
        console.step("tracing")
        console.step("writing", total=10)
        console.advance(4)
        console.advance(6)
    shown = capsys.readouterr().err
    assert "moexport: tracing" in shown
    assert "━" in shown


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in {"TERM": "xterm", "FORCE_COLOR": "1", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)


def searching(console: Console) -> None:
    """Says what a search says."""
    for number in range(20):
        console.step("measuring layer: 5 rounds of 4 cases", total=20)
        console.advance(20)
        console.step(f"searching: {number} graphs, best so far 0.03 ms")


def test_many_steps_are_one_line_that_goes_when_they_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch)
    with Console() as console:
        searching(console)
    screen = Screen(capsys.readouterr().err)
    assert (screen.most_bars, screen.lines) == (1, [])


def test_elsewhere_many_steps_are_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with Console() as console:
        for number in range(20):
            console.step(f"measuring layer: 5 rounds of {number} cases", total=20)
    assert capsys.readouterr().err == "moexport: measuring layer: 5 rounds of 0 cases\n"


def test_results_stand_where_they_were_said_where_both_streams_are_one(tmp_path: Path) -> None:
    code = "from moexport.common.console import Console, show\n"
    code += "Console().step('loading'); show('12%'); Console().note('done')"
    with (tmp_path / "both").open("w") as both:
        subprocess.run([sys.executable, "-c", code], stdout=both, stderr=both, check=True)
    text = (tmp_path / "both").read_text()
    assert text == "moexport: loading\n12%\nnote: done\n"


def test_an_error_leaves_no_bar_behind_whoever_has_drawn_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch)
    Console().step("loading vit.pt", total=10)
    Console().error("vit.pt: no such file", "check the path")
    screen = Screen(capsys.readouterr().err)
    assert screen.lines == ["error: vit.pt: no such file", "hint: check the path"]


def test_a_search_says_one_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Console() as console:
        for number in range(40):
            console.step(f"searching: {number} graphs, best so far 0.03 ms")
        console.step("confirming")
    assert capsys.readouterr().err.splitlines() == [
        "moexport: searching: 0 graphs, best so far 0.03 ms",
        "moexport: confirming",
    ]


PLAN = "3 rows; about 8 s\n  vit, n=8, batch 1: pytorch-eager k=8; onnxruntime dense,gather k=8,2"
SENTENCE = "Other programs slowed these measurements down: threads waited. Measure again."
NAME = "vit of a long name, [batch] 1, [/runs/a]: timing: 5 rounds of 14 cases"


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_terminal_cuts_neither_plans_nor_sentences_nor_the_bar(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch, columns)
    with Console() as console:
        console.step(PLAN)
        console.step(NAME, total=10)
        console.advance(5)
        console.step(SENTENCE)
        console.step("a step with no total")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line for part in shown.split("\n") for line in part.split("\r")]
    assert max(map(len, lines)) <= columns
    words = " ".join(shown.split())
    assert " ".join(PLAN.split()) in words
    assert SENTENCE in words
    bars = [line for line in lines if "━" in line and "vit" in line]
    assert bars
    assert all("…" in line for line in bars)


HOSTILE = "a\x1b[2J\rb\nerror: c\x9b1m\u202ed\udc80"
ESCAPED = "a\\u001b[2J\\u000db\\u000aerror: c\\u009b1m\\u202ed\\udc80"


def test_file_content_cannot_control_the_terminal_or_forge_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    console.note(HOSTILE)
    console.error(HOSTILE, HOSTILE)
    assert capsys.readouterr().err == f"note: {ESCAPED}\nerror: {ESCAPED}\nhint: {ESCAPED}\n"
    console.step(HOSTILE)
    assert "\x1b" not in capsys.readouterr().err
    show(table(("name", "k"), [(HOSTILE, 1), ("é 日本 🙂\t", 2)]))
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == ESCAPED.split(maxsplit=1)[0]
    assert second.startswith("é 日本 🙂\t")
    assert lines("a", HOSTILE) == f"a\n{ESCAPED}"


def test_json_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"name": HOSTILE.removesuffix("\udc80"), "tag": "\U000e0041", "more": [1, "é"]}
    show(json.dumps(content, ensure_ascii=False, indent=1))
    printed = capsys.readouterr().out
    assert json.loads(printed) == content
    assert printable(printed, several=True) == printed


def test_html_and_formulas_are_escaped() -> None:
    assert markdown_text("<img src=x>\n# b") == "&lt;img src=x>\\u000a# b"
    assert markdown_text("![](http://x)") == r"!\[\](http://x)"
    assert markdown_text(r"a\[b](c)|d") == r"a\\\[b\](c)\|d"
    assert [markdown_text(each) for each in ("# a", " > b", "- c", "```sh", "---", "+40%")] == [
        *(r"\# a", r" \> b", r"\- c", r"\```sh", r"\---", "+40%")
    ]
    assert [csv_cell(each) for each in ("=1+1", "@x", "+1", "-1", "\t=1", "x=1", -1, None)] == [
        *("'=1+1", "'@x", "'+1", "'-1", "'\t=1", "x=1"),
        *(-1, None),
    ]
