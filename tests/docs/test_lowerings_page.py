"""The page on lowerings shows the graphs that are really written."""

from __future__ import annotations

from moexport.docs.refresh import listed_ops
from moexport.tests.docs.documents import ROOT


def test_the_page_lists_the_ops_of_every_lowering() -> None:
    page = (ROOT / "docs" / "lowerings.md").read_text(encoding="utf-8")
    for section, ops in listed_ops().items():
        listing = f"### {section}\n\n```text\n{ops}```\n"
        assert listing in page, (
            f"`python docs/refresh.py lowerings` brings it up to date: {listing}"
        )
