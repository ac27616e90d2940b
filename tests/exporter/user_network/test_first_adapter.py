"""A first adapter for a layer: found, and right; or what was not recognised is said."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.errors import FamilyError, UsageError
from moexport.tests.command import run
from moexport.tests.docs.documents import ROOT

FOUND = ("Tempered", "Biased", "NormedExperts", "OneMap", "Mixed", "Swapped")
FOUND_ROUTED = ("Dense", "Shared", "Sigmoid")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # Layers without the adapters that the example has for them.
    source = (ROOT / "examples" / "own_layers.py").read_text(encoding="utf-8")
    source = source.replace("@moexport.adapts(", "@(lambda *_: lambda adapter: adapter)(")
    (tmp_path / "bare_layers.py").write_text(source)
    for name in ("bare_layers", "found"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("name", [*FOUND, *FOUND_ROUTED])
def test_the_adapter_that_is_written_serves_the_layer(name: str, tmp_path: Path) -> None:
    outcome = run("adapt", f"bare_layers:{name}", "-o", "found.py")
    assert outcome.code == 0, outcome.err
    module = importlib.import_module("bare_layers")
    (key,) = (key for key, made in module.LAYERS.items() if made.__name__ == name)
    importlib.import_module("found")
    model = moexport.load("bare_layers:build", config={"layer": key})
    moexport.export(model, tmp_path / "out")
    x = np.random.default_rng(1).standard_normal((4, 12, 6)).astype(np.float32)
    assert moexport.Bundle.open(tmp_path / "out").session()(x).shape == (4, 5)
    assert ("forward" in (tmp_path / "found.py").read_text()) == (
        name in ("Swapped", *FOUND_ROUTED)
    )


def test_what_was_not_recognised_is_said_and_a_frame_is_written(tmp_path: Path) -> None:
    outcome = run("adapt", "bare_layers:ExpertChoice", "-o", "found.py")
    assert outcome.code != 0
    assert "what is around the experts: " in outcome.err and "usual forms were tried" in outcome.err
    text = (tmp_path / "found.py").read_text()
    assert "raise NotImplementedError" in text and "experts=layer.experts" in text
    outcome = run("adapt", "bare_layers:SpecialisedExperts")
    assert "the experts: experts[0] (Specialised): " in outcome.err.replace("layer.", "")
    assert "a further linear map" in outcome.err


def test_a_layer_that_cannot_be_made_or_called_says_so() -> None:
    with pytest.raises(UsageError, match="cannot be made: TypeError") as refused:
        moexport.adapt("bare_layers:Net")
    assert "--set" in str(refused.value.hint)
    with pytest.raises(UsageError, match=r"its forward takes no tokens \[3, 7, 16\]: TypeError"):
        moexport.adapt("bare_layers:Masked")
    with pytest.raises(FamilyError, match="Mlp holds no experts that moexport recognises"):
        moexport.adapt("bare_layers:Mlp")
