"""What the refusals of these tests say is recorded, word by word."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moexport.tests.command import Outcome
from moexport.tests.golden.golden import RECORDED, WRITES, compared, other_versions, without

MODULES = ("test_errors", "test_idle_options")
MEASURED = re.compile(r"\d(\.\d+)?e-\d+")


def message_of(outcome: Outcome, temporary: Path) -> dict[str, Any]:
    """The exit code of a command, its error and its hint, without folders and measured numbers."""
    lines = [line for line in outcome.err.splitlines() if line.startswith(("error: ", "hint: "))]
    folder = re.compile(rf"{re.escape(str(temporary))}/(popen-gw\d+/)?[^/\s:']+")
    lines = [MEASURED.sub("…", folder.sub("…", line)) for line in lines]
    return {"code": outcome.code, "lines": [without(line, ()) for line in lines]}


@pytest.fixture(autouse=True)
def messages_are_as_recorded(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Compares each message that a test of these modules meets with the recorded one."""
    module = request.module.__name__.rpartition(".")[2]
    if module not in MODULES or other_versions():
        yield
        return
    found: list[dict[str, Any]] = []
    temporary = tmp_path_factory.getbasetemp()
    original = request.module.run

    def run(*arguments: Any) -> Outcome:
        outcome: Outcome = original(*arguments)
        found.append(message_of(outcome, temporary))
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
