"""The site builds from the pages without a warning, and needs no network to be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import typer
from moexport import __all__ as calls
from moexport.cli import app
from moexport.docs.sources import ROOT
from moexport.tests.bench.report.browser import browser, missing
from moexport.tests.docs.documents import SITE

EXTERNAL = re.compile(
    r'<(?:script|img|iframe|source)[^>]*\ssrc=["\']?https?:|<link[^>]*stylesheet[^>]*https?:'
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; mkdocs fails for a link, a heading or a page of the navigation that is missing."""
    pytest.importorskip("material", reason="mkdocs-material comes with the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    assert "tune.md" in SITE
    for address in SITE:
        html = (site / address).with_suffix(".html").read_text(encoding="utf-8")
        assert EXTERNAL.findall(html) == [], address


def test_links_between_a_plugin_and_the_core_lead_to_pages_of_the_site(site: Path) -> None:
    for name, link in (
        ("index.html", "triton.html"),
        ("triton.html", "install.html#a-machine-that-only-runs-bundles"),
        ("own-layer.html", "own-layer-examples.html"),
        ("evidence/security.html", "../security.html"),
    ):
        assert f'href="{link}"' in (site / name).read_text(encoding="utf-8"), name


def test_the_references_list_every_command_call_and_error(site: Path) -> None:
    def text(name: str) -> str:
        return unescape((site / name).read_text(encoding="utf-8"))

    commands = text("reference-cli.html")
    for command in vars(typer.main.get_command(app))["commands"]:
        assert f'<h2 id="{command}">' in commands
        assert re.search(rf"Usage: moexport {command} ", commands)
    python, listed = text("reference-python.html"), text("errors.html")
    kinds = {name for name in calls if name.endswith("Error")}
    assert all(f'<h2 id="{name.lower()}">' in python for name in {*calls} - kinds)
    assert all(f"<code>moexport.{name}</code>" in listed for name in kinds)


def test_the_site_has_a_report_to_try(site: Path) -> None:
    report = site / "demo-report.html"
    assert report.stat().st_size < 1_000_000
    assert "digits, n = 128" in report.read_text(encoding="utf-8")
    for page in ("index.html", "bench.html"):
        linked = re.findall(r'<a href="demo-report.html">', (site / page).read_text("utf-8"))
        assert linked, page


SEARCH = """
document.querySelector("#__search").click()
const query = document.querySelector("[data-md-component=search-query]")
query.focus()
query.value = arguments[0]
query.dispatchEvent(new Event("input", { bubbles: true }))
query.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }))
"""
FOUND = "return Array.from(document.querySelectorAll('.md-search-result__link'), a => a.href)"


@pytest.mark.skipif(missing() is not None, reason=f"Chromium: {missing()}")
def test_pages_that_were_opened_from_a_folder_can_be_searched(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as window:
        window.open(site / "index.html")
        window.run(SEARCH, "renormalize")
        window.wait(f"{FOUND}.length")
        found = window.run(FOUND)
        assert any("lowerings.html" in link for link in found), (found, window.console())
