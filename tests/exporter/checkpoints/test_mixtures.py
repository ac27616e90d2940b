"""examples/mixtures.py: every mixture of the literature by one adapter, exported and compared."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import FamilyError, ParityError, UsageError
from moexport.exporter.model import Model

ROOT = Path(__file__).parents[3]
KEPT = {
    "continuous": 8,
    "noisy-top-k": 2,
    "switch": 1,
    "gshard": 2,
    "base": 1,
    "hash": 1,
    "expert-choice": 1,  # of the rows that the layer is given: a pair of token and expert each
    "hierarchical": 2,
    "deep": 8,
}
OF_BATCH = ("gshard", "expert-choice")
"""Who gets what depends on the other inputs of the batch, which is fixed for that reason."""


@pytest.fixture(scope="module")
def mixtures() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("mixtures", ROOT / "examples" / "mixtures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mixtures"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mixtures"]


def loaded(name: str) -> Model:
    return moexport.load("mixtures:build", config={"mixture": name})


@pytest.mark.usefixtures("mixtures")
@pytest.mark.parametrize("name", KEPT)
def test_a_mixture_of_the_literature_is_exported_as_it_is(name: str, tmp_path: Path) -> None:
    model = loaded(name)
    assert {layer.spec.trained_k for layer in model.layers.values()} == {KEPT[name]}
    # No word twice in a batch: which of two equal tokens an expert takes means nothing.
    random = np.random.default_rng(1)
    words = np.concatenate([random.permutation(50)[:36].reshape(3, 12) for _ in range(3)])
    batch = "3" if name in OF_BATCH else "1:1:32"
    bundle = moexport.export(model, tmp_path / "out", batch=batch, data=words)
    assert all(check.passed for check in bundle.verify())
    words = words[3:6]
    assert model.original is not None
    with torch.no_grad():
        expected = model.original(torch.from_numpy(words)).numpy()
    y = bundle.session()(words)
    assert np.abs(y - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.usefixtures("mixtures")
@pytest.mark.parametrize(
    ("name", "says"), [("continuous", "is given all its experts"), ("switch", "1 experts a token")]
)
def test_a_k_that_only_the_network_could_choose_is_refused(
    name: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        moexport.export(loaded(name), tmp_path / "out", k=3)


@pytest.mark.usefixtures("mixtures")
def test_an_adapter_that_says_another_activation_is_told_the_right_one(
    mixtures: ModuleType,
) -> None:
    def wrong(layer: Any) -> moexport.Experts:
        return moexport.Experts(w1=layer.up, w2=layer.down, activation="silu")

    wrong.__annotations__["layer"] = mixtures.Experts
    with pytest.raises(ParityError, match="activation='relu'"):
        moexport.load("mixtures:build", config={"mixture": "switch"}, adapter=wrong)


@pytest.mark.usefixtures("mixtures")
def test_experts_that_are_called_with_tokens_alone_are_refused(mixtures: ModuleType) -> None:
    def wrong(layer: Any) -> moexport.Experts:
        return moexport.Experts(w1=layer.experts.up, w2=layer.experts.down)

    wrong.__annotations__["layer"] = mixtures.Switch
    with pytest.raises(FamilyError, match="is not called with tokens, index and weights"):
        moexport.load("mixtures:build", config={"mixture": "switch"}, adapter=wrong)
