"""Versions that were not run are said, not refused; what was run is what the kept rows hold."""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import Any

import pytest
from moexport.common.libraries import CACHES, TESTED, graph_of, older, untested_versions
from moexport.docs.sources import ROOT
from moexport.plugins.token_routed.trace import _exported_name
from moexport.tests.command import run

NEWER = "torch 2.99 is newer than those tested: 2.9 to 2.15"


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Puts versions in the place of those installed; None where a package is not installed."""
    actual = metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return actual(name)
        found = versions[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.99.0+cu130", [NEWER]),
        ("2.8.1", ["torch 2.8 is older than those tested: 2.9 to 2.15"]),
        ("3.0.0a0", ["torch 3.0 is newer than those tested: 2.9 to 2.15"]),
        ("2.9.1", []),
        ("2.15.7", []),
        (None, []),
    ],
)
def test_a_version_that_was_not_run_is_said_in_a_line(
    version: str | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, **(dict.fromkeys(TESTED) | {"torch": version}))
    assert untested_versions() == said


def test_doctor_and_every_other_command_say_it_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, torch="2.99.0")
    assert NEWER in run("doctor").out.splitlines()
    assert NEWER in json.loads(run("doctor", "--json").out)["outside"]
    assert run("doctor").err == ""
    weights = ROOT / "tests" / "data" / "mumoe_cp" / "weights.pt"
    assert f"note: {NEWER}\n" in run("inspect", weights).err
    assert NEWER not in run("inspect", weights, "--quiet").err
    assert NEWER not in run("inspect", "--help").err


def test_a_package_that_is_not_installed_is_not_older(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, onnxruntime=None, torch="2.9.1")
    assert not older("onnxruntime", (1, 31))
    assert older("torch", (2, 13)) and not older("torch", (2, 9))


def test_the_ends_are_those_of_the_rows_that_were_run() -> None:
    rows = json.loads((ROOT / "perf" / "results" / "compat.json").read_text(encoding="utf-8"))
    run_with = [row["versions"] for row in rows if row["why"] is None]
    for name, ends in TESTED.items():
        texts = [versions[name] for versions in run_with if name in versions]
        found = sorted(tuple(map(int, re.findall(r"\d+", text)[:2])) for text in texts)
        assert (found[0], found[-1]) == ends, name


class Wrapped:
    """What transformers 5.23 gives."""

    def __init__(self, program: Any) -> None:
        self.program = program


class Plain:
    """What 5.20 gives: PyTorch's own."""

    def __init__(self, model: Any) -> None:
        self.model = model


def test_the_graph_is_found_in_what_either_exporter_gives() -> None:
    graph = object()
    assert graph_of(Wrapped(graph)) is graph
    assert graph_of(Plain(graph)) is graph


@pytest.mark.parametrize("of", ["", ".self_attention_cache"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_is_found_by_what_either_library_calls_it(cache: str, of: str) -> None:
    path = f"{cache}{of}.layers.3.keys"
    given = {path: None, f"{cache}.cross_attention_cache.layers.3.keys": None, "logits": None}
    assert _exported_name("present.3.key", given) == path
    assert _exported_name("logits", given) == "logits"
