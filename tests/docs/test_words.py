"""The core pages stay short: what one reads to use moexport, without evidence and plugins."""

from __future__ import annotations

from moexport.docs.sources import core_pages
from moexport.tests.docs.documents import SITE

MOST = 18_000
"""Words of all core pages together, as `wc -w` counts them: this number only falls."""


def test_the_core_pages_have_no_more_words_than_before() -> None:
    pages = core_pages()
    assert {"index.md", "guide.md", "deploy.md", "bench.md"} <= pages.keys()
    assert not {"evidence/performance.md", "tune.md"} & pages.keys()
    words = {name: len(page.read_text(encoding="utf-8").split()) for name, page in pages.items()}
    assert sum(words.values()) <= MOST, words


def test_no_two_pages_have_one_address() -> None:
    folders = {page.parents[address.count("/")] for address, page in SITE.items()}
    assert len(SITE) == sum(len([*folder.rglob("*.md")]) for folder in folders)
