"""The pages show the results that are kept, as the benchmarks print them."""

from __future__ import annotations

import pytest
from moexport.bench.results import read
from moexport.docs.refresh import MEASURED, ROOT, demo_table
from moexport.docs.site_hooks import DEMO


@pytest.mark.parametrize("page", list(MEASURED))
def test_the_tables_of_a_page_are_those_of_the_kept_results(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, content in MEASURED[page]().items():
        shown = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
        assert shown == content, (
            f"docs/{page}, {name}: `python docs/refresh.py performance` brings it up to date"
        )


def test_the_table_of_the_readme_is_that_of_the_kept_demo() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- demo-table -->\n{demo_table(read(DEMO))}<!-- /demo-table -->" in text
