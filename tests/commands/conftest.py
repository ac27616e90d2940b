"""What the refusals of these tests say is recorded, word by word."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from moexport.tests.command import Outcome
from moexport.tests.golden.golden import RECORDED, WRITES, compared, other_versions, without

MODULES = ("test_errors", "test_idle_options")
MASKED = re.compile(r"[^\s:']*pytest-of-\w+/pytest-\d+/(?:popen-gw\d+/)?[^/\s:']+|\d(\.\d+)?e-\d+")
"""Temporary folders and measured differences."""


def message_of(outcome: Outcome) -> dict[str, Any]:
    """The exit code of a command, its error and its hint."""
    lines = [line for line in outcome.err.splitlines() if line.startswith(("error: ", "hint: "))]
    return {"code": outcome.code, "lines": [without(MASKED.sub("…", line), ()) for line in lines]}


@pytest.fixture(autouse=True)
def messages_are_as_recorded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Compares each message that a test of these modules meets with the recorded one."""
    module = request.module.__name__.rpartition(".")[2]
    if module not in MODULES or other_versions():
        yield
        return
    found: list[dict[str, Any]] = []
    original = request.module.run

    def run(*arguments: Any) -> Outcome:
        outcome: Outcome = original(*arguments)
        found.append(message_of(outcome))
        return outcome

    monkeypatch.setattr(request.module, "run", run)
    yield
    place = RECORDED / "messages" / f"{module}.json"
    name = request.node.name
    recorded = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    if WRITES:
        place.parent.mkdir(parents=True, exist_ok=True)
        recorded = dict(sorted({**recorded, name: found}.items()))
        text = json.dumps(recorded, indent=1, ensure_ascii=False)
        place.write_text(text + "\n", encoding="utf-8")
        return
    assert compared(recorded[name], found) == []
