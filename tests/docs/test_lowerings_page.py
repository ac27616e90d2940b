"""The pages of the registries are what `python docs/refresh.py registries` writes."""

from __future__ import annotations

import pytest
from moexport.docs.refresh import ops_of_lowerings
from moexport.docs.registries import LISTED
from moexport.docs.sources import ROOT
from moexport.tests.docs.documents import SITE

REFRESH = "`python docs/refresh.py registries` brings it up to date"


def marked(text: str, name: str) -> str:
    """What stands between the markers of a table."""
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


@pytest.mark.parametrize("page", list(LISTED))
def test_a_refresh_changes_no_table_of_a_registry(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in LISTED[page].items():
        assert marked(text, name) == table(), f"{page}, {name}: {REFRESH}"


def test_a_refresh_changes_no_listing_of_ops() -> None:
    text = SITE["evidence/lowerings.md"].read_text(encoding="utf-8")
    assert marked(text, "ops") == ops_of_lowerings(), REFRESH
