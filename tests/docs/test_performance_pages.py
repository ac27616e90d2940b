"""The pages show the results that are kept, as the benchmarks print them."""

from __future__ import annotations

import re

import pytest
from moexport.bench.results import read
from moexport.docs.refresh import MEASURED, RESULTS, ROOT, demo_table
from moexport.docs.site_hooks import DEMO
from moexport.tests.docs.documents import SITE


@pytest.mark.parametrize("page", list(MEASURED))
def test_the_tables_of_a_page_are_those_of_the_kept_results(page: str) -> None:
    text = SITE[page].read_text(encoding="utf-8")
    for name, content in MEASURED[page]().items():
        shown = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
        assert shown == content, (
            f"{page}, {name}: `python docs/refresh.py performance` brings it up to date"
        )


def test_the_table_of_the_readme_is_that_of_the_kept_demo() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- demo-table -->\n{demo_table(read(DEMO))}<!-- /demo-table -->" in text


def test_what_is_left_of_the_norm_is_that_of_the_kept_results() -> None:
    page = SITE["evidence/performance.md"].read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `l2norm` |")]
    shown = [int(share) for share in re.findall(r"(\d+)%", row)]
    losses = read(RESULTS / "paper-l2norm.json").analyses["l2norm"]["losses"]
    left = {(each["experts"], each["tokens"]): each["test"][-1] for each in losses}
    wanted = [left[n, tokens] for n in (1, 2, 5, 10) for tokens in (5, 2)]
    assert shown == [round(100 * loss) for loss in wanted]
