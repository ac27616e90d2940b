"""Messages name what their reader has: pages that exist, and keywords where Python is used."""

from __future__ import annotations

import re
from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.common.console import DOCS, page_file, with_pages
from moexport.common.messages.in_python import Keyword, Words
from moexport.common.messages.shell import in_shell
from moexport.common.option import keywords_of
from moexport.errors import FamilyError, UsageError
from moexport.exporter.options import ExportOptions
from moexport.tests.command import run, run_program
from moexport.tests.test_wheel import package_files

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("*.py"), *package_files("*.py")]
NAMED = re.compile(r"docs/([\w-]+\.md)(?:#([\w-]+))?")


def headings(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in found)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_every_page_that_a_message_names_is_there() -> None:
    named = {
        (file.relative_to(ROOT), page, heading)
        for file in SOURCES
        for page, heading in NAMED.findall(file.read_text(encoding="utf-8"))
    }
    assert len(named) > 5  # so many without plugins, too
    pages = {page: page_file(page) for _, page, _ in named}
    assert [page for page, file in pages.items() if file is None] == []
    known = {page: headings(file) for page, file in pages.items() if file is not None}
    assert [each for each in named if each[2] and each[2] not in known[each[1]]] == []


def test_a_page_is_named_by_its_file_but_in_the_clone_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "docs/mumoe.md#int8, or docs/families.md; docs/nowhere.md"
    monkeypatch.chdir(ROOT)
    assert with_pages(text) == text
    monkeypatch.chdir(tmp_path)
    expected = f"{DOCS}/mumoe.md#int8, or {DOCS}/families.md; docs/nowhere.md"
    assert with_pages(text) == expected
    assert with_pages(expected) == expected


@pytest.mark.plugins
def test_a_page_of_a_plugin_is_named_by_its_file_with_the_plugin() -> None:
    page = ROOT / "plugins" / "tune" / "docs" / "tune.md"
    assert with_pages("docs/tune.md#example lists it") == f"{page}#example lists it"


def test_a_command_elsewhere_names_pages_that_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    refused = run_program("inspect", "notes.txt", cwd=tmp_path)
    (page,) = re.findall(r"\S+/docs/[\w-]+\.md", refused.hint)
    assert Path(page).is_file()


EXPORT = Words("export", keywords_of(ExportOptions))


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        ("out: exists; --force replaces it", "out: exists; force=True replaces it"),
        ("--k 300: layer a has 16", "k=300: layer a has 16"),
        ("--k n or --k input", 'k="n" or k="input"'),
        ("--k n,0.5,4: a list", 'k=["n", 0.5, 4]: a list'),
        ("--k 4,4: 2 values for 3 layers", "k=[4, 4]: 2 values for 3 layers"),
        ("or a number per layer (4,4,8)", "or a number per layer ([4, 4, 8])"),
        ("all 50,000 (of 1,234,567) inputs", "all 50,000 (of 1,234,567) inputs"),
        ("--k [1, 2]: too few", "k=[1, 2]: too few"),
        ("leave --data or --no-verify out", "leave data=… or verify=False out"),
        ("leave --k out; it is baked", "leave k=… out; it is baked"),
        ("use --precision int8 or fp32", 'use precision="int8" or fp32'),
        ("--batch 1:32:64 covers all", "batch=(1, 32, 64) covers all"),
        ("--batch x: expected MIN:OPT:MAX", 'batch="x": expected (MIN, OPT, MAX)'),
        ("the sizes in order are 1:2:3", "the sizes in order are (1, 2, 3)"),
        ("--steer layer:1:2 of blocks.0:1:2:3", 'steer="layer:1:2" of blocks.0:1:2:3'),
        ("--context N makes it smaller", "context=N makes it smaller"),
        ("--set num_heads=12 --set rest=default", 'config={"num_heads": 12, "rest": "default"}'),
        ("--set input_shape=3,224,224", 'config={"input_shape": [3, 224, 224]}'),
        ("--set dim=… --set KEY=VALUE", 'config={"dim": …, "KEY": VALUE}'),
        ("--set x: not KEY=VALUE", 'sets=["x"]: not KEY=VALUE'),
        (
            "`moexport export x.pt --set a=1 --set b=c --batch 1:1:4`",
            '`moexport.export("x.pt", config={"a": 1, "b": "c"}, batch=(1, 1, 4))`',
        ),
        ("--target no-such: there is none", 'target="no-such": there is none'),
        ("it failed: --verbose shows where", "it failed: the traceback shows where"),
        ("`moexport COMMAND --help` lists them", "`help(moexport.export)` lists them"),
        ("`moexport inspect` shows it", "`moexport.inspect()` shows it"),
        ("moexport doctor names them", "`moexport.doctor()` names them"),
        (
            "moexport build out/a --target tensorrt builds one",
            '`moexport.build("out/a", target="tensorrt")` builds one',
        ),
        (
            "`moexport export x.pt -o out --k 4 --force` does",
            '`moexport.export("x.pt", "out", k=4, force=True)` does',
        ),
        ("name it: moexport bench MODEL out/a", 'name it: `moexport.bench([model, "out/a"])`'),
        ("moexport is not on PyPI: moexport bakes k", "moexport is not on PyPI: moexport bakes k"),
    ],
)
def test_options_and_commands_are_keywords_and_calls(typed: str, called: str) -> None:
    assert EXPORT.text(typed) == called
    assert EXPORT.text(called) == called


def test_a_keyword_is_the_one_of_the_call_and_not_of_the_shell() -> None:
    words = Words("build", {"force": Keyword("rebuild", switch=True)})
    assert words.text("--force builds it again") == "rebuild=True builds it again"


def test_the_shell_and_python_tell_one_error_each_in_its_own_words(tmp_path: Path) -> None:
    weights = ROOT / "tests" / "data" / "soft_moe_mnist" / "weights.pt"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    typed = run("export", weights, "-o", tmp_path / "out", "--k", "4")
    assert typed.hint == "choose another -o"
    with pytest.raises(moexport.MoexportError) as called:
        moexport.export(weights, tmp_path / "out", k=4)
    assert called.value.hint == "choose another destination"


def test_a_call_within_a_command_keeps_the_words_of_the_shell() -> None:
    with in_shell(), pytest.raises(UsageError) as typed:
        moexport.load("nowhere.pt", sets=["x"])
    with pytest.raises(UsageError) as called:
        moexport.load("nowhere.pt", sets=["x"])
    assert typed.value.message == "--set x: not KEY=VALUE"
    assert called.value.message == 'sets=["x"]: not KEY=VALUE'


def test_an_error_of_what_is_read_bit_by_bit_speaks_python_too(tmp_path: Path) -> None:
    with pytest.raises(moexport.MoexportError) as called:
        [*moexport.verify(tmp_path)]
    assert "--" not in f"{called.value.message} {called.value.hint}"
    assert not isinstance(called.value, FamilyError)


def test_sessions_and_bundles_speak_python(tmp_path: Path) -> None:
    model = moexport.load(ROOT / "tests" / "data" / "soft_moe_mnist" / "weights.pt")
    bundle = moexport.export(model, tmp_path / "out", k="input", batch=(1, 2, 4), verify=False)
    assert bundle.manifest.inputs[0].shape[0] == "batch"
    x = np.zeros((2, 1, 28, 28), np.float32)
    wrong = (
        lambda: bundle.session()(x),
        lambda: bundle.session()(x[:, :, 1:], k=2),
        lambda: bundle.session().run(x),
        lambda: moexport.Bundle.open(tmp_path / "none"),
    )
    for call in wrong:
        with pytest.raises(moexport.MoexportError) as told:
            call()
        words = f"{told.value.message} {told.value.hint}"
        assert "--" not in words and "`moexport " not in words, words
    with pytest.raises(UsageError) as told:
        moexport.export(model, tmp_path / "other", batch=(4, 2, 1))
    assert told.value.message.startswith("batch=(4, 2, 1): needs 1 ≤ MIN")
    assert told.value.hint == "the sizes in order are (1, 2, 4)"
