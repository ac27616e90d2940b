"""The pages on performance show the results that are kept, as the benchmarks print them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from moexport.bench.results import read
from moexport.docs.refresh import (
    RESULTS,
    ROOT,
    demo_table,
    history_tables,
    one_run_tables,
    performance_tables,
    token_routed_tables,
)
from moexport.docs.site_hooks import DEMO

PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "performance.md": performance_tables,
    "token-routed.md": token_routed_tables,
    "history.md": history_tables,
    "one-run.md": partial(one_run_tables, RESULTS / "one-run"),
}


@pytest.mark.parametrize("page", list(PAGES))
def test_the_tables_of_a_page_are_those_of_the_kept_results(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, content in PAGES[page]().items():
        shown = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
        assert shown == content, (
            f"docs/{page}, {name}: `python docs/refresh.py performance` brings it up to date"
        )


def test_the_table_of_the_readme_is_that_of_the_kept_demo() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- demo-table -->\n{demo_table(read(DEMO))}<!-- /demo-table -->" in text
