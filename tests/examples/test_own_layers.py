"""Layers as people write them: exported with their adapters, compared with their own PyTorch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.docs.sources import ROOT
from moexport.errors import ParityError, UsageError
from moexport.plugins.own_layers.adapters import adapter_of
from moexport.plugins.own_layers.tests import naive
from moexport.tests.docs.documents import SITE, blocks

PAGE = SITE["own-layer-examples.md"]

WHOLE_BATCH = ("outside", "capacity")
"""What these give for an input depends on the others of its batch."""

EVEN = ("swapped", "expert-choice", "outside")
"""Every expert has the same sum of C."""

NO_K = (*EVEN, "capacity")

PER_RUN = ("tempered", "biased", "normed", "one-map", "mixed", "masked", "backbone")
"""Algorithm 1 chooses in the graph, so that k may be one of its inputs."""

LAYERS = (
    *("tempered", "biased", "normed", "one-map", "mixed", "masked", "swapped", "expert-choice"),
    *("outside", "dense", "shared", "sigmoid", "heads", "convolved", "capacity", "backbone"),
)


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example, imported as its user imports it."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "examples"))
    sys.modules.pop("own_layers", None)
    yield importlib.import_module("own_layers")
    patch.undo()


def exported(name: str, folder: Path, **options: Any) -> tuple[Any, np.ndarray]:
    """A verified bundle, and inputs that it was not compared with."""
    model = moexport.load("own_layers:build", config={"layer": name})
    x = np.random.default_rng(3).standard_normal((16, 12, 6)).astype(np.float32)
    batch: dict[str, Any] = {"batch": len(x)} if name in WHOLE_BATCH else {}
    if options.get("precision") == "int8":
        np.savez(folder.with_suffix(".npz"), input=x)
        options["data"] = folder.with_suffix(".npz")
    moexport.export(model, folder, **batch, **options)
    assert all(check.passed for check in moexport.verify(folder))
    return moexport.Bundle.open(folder), x


def difference(expected: np.ndarray, actual: np.ndarray) -> float:
    return float(np.abs(expected - actual).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_gives_what_its_own_network_gives(
    name: str, example: ModuleType, tmp_path: Path
) -> None:
    bundle, x = exported(name, tmp_path / "out")
    with torch.no_grad():
        expected = example.build(name)(torch.from_numpy(x)).numpy()
    assert difference(expected, bundle.session()(x)) < 1e-5


def computed(
    example: ModuleType, name: str, x: np.ndarray, k: int | None, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    """What a network gives in float64 with k experts, as its adapter describes its layer."""
    net = example.build(name)
    layer = net.mixture.layer
    description = adapter_of(layer, {})(layer)  # type: ignore[misc]
    net, own = net.double(), naive.forward_of(description, k)
    returned: dict[str, Any] = {"biased": lambda y: {"output": y}, "outside": lambda y: (y, {})}
    as_returned = returned.get(name, lambda y: y)
    monkeypatch.setattr(layer, "forward", lambda *args: as_returned(own(*args)))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            y = net(torch.from_numpy(x).double())
    finally:
        torch.set_default_dtype(torch.float32)
    return y.numpy()  # type: ignore[no-any-return]


FEW = ("tempered", "masked", "shared", "dense", "backbone")
"""The kinds of adapters: what the fast tests try in every form."""


def few_fast(names: Iterable[str]) -> list[Any]:
    """Parameters of a test, slow but for a few."""
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", few_fast(name for name in LAYERS if name not in NO_K))
def test_a_quarter_of_the_experts_gives_what_the_adapter_says(
    name: str, example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, x = exported(name, tmp_path / "quarter", k=0.25)
    assert [layer.k for layer in bundle.manifest.layers] == [1]
    expected = computed(example, name, x, 1, monkeypatch)
    assert difference(expected, bundle.session()(x)) < 1e-5
    assert difference(expected, computed(example, name, x, None, monkeypatch)) > 1e-3


@pytest.mark.parametrize("name", EVEN)
def test_no_k_is_chosen_where_every_expert_has_the_same_sum_of_c(
    name: str, example: ModuleType, tmp_path: Path
) -> None:
    del example
    with pytest.raises(UsageError, match="same sum of combine weights C"):
        exported(name, tmp_path / "out", k=2)


@pytest.mark.parametrize("k", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", few_fast(LAYERS))
def test_int8_serves_them(
    name: str, k: int | None, example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if k is None or name in NO_K else {"k": k}
    bundle, x = exported(name, tmp_path / "int8", precision="int8", target="ort-cpu", **options)
    assert [layer.precision for layer in bundle.manifest.layers] == ["int8"]
    expected = computed(example, name, x, options.get("k"), monkeypatch)
    assert difference(expected, bundle.session()(x)) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_RUN)
def test_k_may_be_chosen_per_run(
    name: str, example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, x = exported(name, tmp_path / "any", k="input")
    session = bundle.session()
    for k in (1, 3, 4):
        expected = computed(example, name, x, k, monkeypatch)
        assert difference(expected, session(x, k)) < 1e-5


@pytest.mark.parametrize("name", few_fast(name for name in LAYERS if name not in PER_RUN))
def test_no_k_per_run_where_the_router_is_the_users(
    name: str, example: ModuleType, tmp_path: Path
) -> None:
    del example
    with pytest.raises(UsageError, match="k="):
        exported(name, tmp_path / "out", k="input")


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_what_depends_on_the_batch_needs_its_size(
    name: str, example: ModuleType, tmp_path: Path
) -> None:
    del example
    model = moexport.load("own_layers:build", config={"layer": name})
    with pytest.raises(ParityError, match="depends on the others in its batch") as refused:
        moexport.export(model, tmp_path / "out")
    assert "batch=N" in str(refused.value.hint)


def test_an_expert_with_a_third_map_is_refused(example: ModuleType) -> None:
    del example
    with pytest.raises(UsageError, match="another linear map") as refused:
        moexport.load("own_layers:build", config={"layer": "specialised"})
    assert "one linear map, two, or" in str(refused.value.hint)


def test_the_page_names_every_layer_of_the_example_and_shows_adapters_as_they_are() -> None:
    source = (ROOT / "examples" / "own_layers.py").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    shown = [block.text for block in blocks(PAGE) if block.language == "py"]
    adapters = [part.split("\n\n\n")[0] for part in source.split("@moexport.adapts(")[1:]]
    assert shown
    for text in shown:
        assert text.strip() in source
    for adapter in adapters:
        assert f"`{adapter.partition(')')[0]}`" in page
        lines = [line for line in adapter.splitlines()[1:] if line.strip()]
        assert len(lines) <= 12, adapter
