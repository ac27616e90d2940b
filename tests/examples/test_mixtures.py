"""The literature's mixtures: each exported, compared with its own PyTorch code, and timed."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.engines import ONNXRUNTIME
from moexport.bench.request import BenchRequest
from moexport.bench.runners.candidates import from_bundle
from moexport.bench.runners.exported import exported
from moexport.docs.sources import ROOT
from moexport.errors import ParityError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.model import Model

pytestmark = pytest.mark.slow

TRAINED = {
    "continuous": [16],
    "noisy-top-k": [2],
    "switch": [1],
    "gshard": [2],
    "base": [1],
    "hash": [1],
    "expert-choice": [1],  # of a row: a token has as many rows as experts chose it
    "hierarchical": [4],
    "deep": [2, 2],
}
"""k of each layer as it was trained."""

SMALLER: dict[str, tuple[list[int], dict[str, int]]] = {
    "noisy-top-k": ([1], {"mixture": 1}),
    "hierarchical": ([2], {"mixture": 2}),
    "deep": ([2, 1], {"mixture.second": 1}),
}
"""A k of each layer, and which of the network's own modules are to be told of it."""

WITHOUT_A_K = {
    "continuous": "selects all 16 experts for each token and has no parameter k",
    "switch": "selects 1 of 16 experts for each token and has no parameter k",
    "hash": "selects 1 of 16 experts for each token and has no parameter k",
    "expert-choice": "the network around layer mixture.bank.experts chooses its experts",
}


@pytest.fixture(scope="module")
def mixtures() -> Iterator[ModuleType]:
    """The example, imported as its user imports it."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "examples"))
    yield importlib.import_module("mixtures")
    patch.undo()
    sys.modules.pop("mixtures")


def loaded(name: str) -> Model:
    return moexport.load("mixtures:build", config={"mixture": name})


def words(example: ModuleType, batch: int) -> torch.Tensor:
    """Inputs that the network was not exported with."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(example.WORDS, (batch, example.LENGTH), generator=generator)


def check_against(network: torch.nn.Module, bundle: Bundle, example: ModuleType) -> None:
    """The user's own code and the graph give the same for new inputs in another batch size."""
    ids = words(example, 3)
    with torch.no_grad():
        wanted = network(ids).numpy()
    found = bundle.session().run(ids.numpy())["output"]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def fastest_ms(call: Callable[[], Any]) -> float:
    """The least of some runs: other work on the machine only adds to it."""
    times = []
    for _ in range(15):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


@pytest.mark.parametrize("name", TRAINED)
def test_a_mixture_is_exported_verified_and_faster_than_its_loop_over_experts(
    name: str, mixtures: ModuleType, tmp_path: Path
) -> None:
    model = loaded(name)
    bundle = moexport.export(model, tmp_path / "out", target="ort-cpu")
    assert [layer.k for layer in bundle.manifest.layers] == TRAINED[name]
    parity = bundle.manifest.parity
    assert parity is not None and parity["passed"] and parity["max_rel"] <= 1e-5
    assert parity["differing"] == 0 and parity["agreeing"] == parity["choices"]
    assert all(check.passed for check in moexport.verify(bundle))
    assert model.original is not None
    check_against(model.original, bundle, mixtures)

    ids, session, network = words(mixtures, 1), bundle.session(), model.original
    with torch.no_grad():
        own = fastest_ms(lambda: network(ids))
    graph = fastest_ms(lambda: session.run(ids.numpy()))
    print(f"{name}: {own:.3f} ms in PyTorch, {graph:.3f} ms exported")
    assert graph < own


@pytest.mark.parametrize("name", SMALLER)
def test_a_smaller_k_is_the_network_whose_router_was_told_so(
    name: str, mixtures: ModuleType, tmp_path: Path
) -> None:
    k, told = SMALLER[name]
    model = loaded(name)
    bundle = moexport.export(model, tmp_path / "out", k=k, data=words(mixtures, 9).numpy())
    assert all(check.passed for check in bundle.verify())
    assert [layer.k for layer in bundle.manifest.layers] == k
    network = mixtures.build(name).eval()
    for path, each in told.items():
        network.get_submodule(path).trained_k = each
    check_against(network, bundle, mixtures)
    # The model that was loaded is what it was.
    bundle = moexport.export(model, tmp_path / "again")
    assert model.original is not None
    check_against(model.original, bundle, mixtures)


@pytest.mark.parametrize("name", WITHOUT_A_K)
def test_a_mixture_without_a_k_is_refused_one(
    name: str, mixtures: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=WITHOUT_A_K[name]) as refused:
        moexport.export(loaded(name), tmp_path / "out", k=3)
    assert "leave k=… out" in (refused.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_k_is_no_input_of_a_graph_that_holds_its_router(
    mixtures: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match='k="input": the router of layer mixture'):
        moexport.export(loaded("noisy-top-k"), tmp_path / "out", k="input")


def test_int8_experts_keep_the_router_in_floats(mixtures: ModuleType, tmp_path: Path) -> None:
    bundle = moexport.export(
        loaded("hierarchical"), tmp_path / "out", target="ort-cpu", precision="int8"
    )
    parity = bundle.manifest.parity
    assert parity is not None and parity["agreeing"] == parity["choices"]


def test_each_mixture_cites_its_paper_and_says_what_k_is(mixtures: ModuleType) -> None:
    for name in mixtures.MIXTURES:
        network = mixtures.build(name)
        said = type(network.mixture).__doc__ or ""
        assert '"' in said and re.search(r"\bk (is|counts)\b|There is no k\b", said), name


def test_another_activation_than_the_mixtures_own_is_told(mixtures: ModuleType) -> None:
    def wrong(layer: Any) -> moexport.Experts:
        experts = [(expert.up, expert.down) for expert in layer.experts]
        return moexport.Experts(experts=experts, activation="silu")

    wrong.__annotations__["layer"] = mixtures.Bank
    with pytest.raises(ParityError, match="activation='relu'"):
        config = {"mixture": "expert-choice"}
        moexport.load("mixtures:build", config=config, adapter=wrong)


def test_bench_measures_each_k_of_a_router_in_a_sweep_and_in_a_bundle(
    mixtures: ModuleType, tmp_path: Path
) -> None:
    """A router is part of what is traced: each k has a graph of its own, and its own reference."""
    model, ids = loaded("noisy-top-k"), words(mixtures, 4)
    bundle = moexport.export(model, tmp_path / "out", k=1, target="ort-cpu")
    beside = from_bundle(bundle, BenchRequest(engine=ONNXRUNTIME), model=model)
    with exported(model, BenchRequest(k=("n", 1), engine=ONNXRUNTIME, target="ort-cpu")) as swept:
        assert [graph.k for graph in swept.graphs] == [2, 1]
        graphs = [(swept, graph) for graph in swept.graphs]
        for candidate, graph in [*graphs, (beside, beside.graphs[0])]:
            network = mixtures.build("noisy-top-k").eval()
            network.mixture.trained_k = graph.k
            with torch.no_grad(), graph.loader() as runner:
                wanted = network(ids)
                assert torch.allclose(candidate.jobs_by_k[graph.k].model.module(ids), wanted)
                off = np.abs(runner.infer(ids.numpy()) - wanted.numpy()).max()
                assert off <= 1e-5 * wanted.abs().max()
