"""docs/evidence/security.md: every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "evidence" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) >= 20
    for file, test in named:
        folder = ROOT if file.startswith("plugins/") else ROOT / "tests"
        assert f"def {test}(" in (folder / file).read_text(encoding="utf-8"), (file, test)
    rows = [
        line
        for line in page.splitlines()
        if line.startswith("| ") and line.count(" | ") == 1 and line != "| promise | test |"
    ]
    assert len(rows) >= 20
    assert all("::test_" in row for row in rows)
