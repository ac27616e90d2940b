"""A graph with PyTorch's choices as inputs: tokens after a tie are compared as well."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.given_choices import GivenSession, given_choice, own_choice
from moexport.exporter.bundle.parity import Comparison, Parity, Reference, stored_bounds
from moexport.exporter.bundle.verify import checking_session
from moexport.exporter.session import Session, SessionOptions
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, Library, save
from moexport.tests.command import run
from onnx import helper

IDS = np.random.default_rng(0).integers(0, 61, (2, 7))


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """BF16 swaps experts with nearly equal scores, which changes all later tokens."""
    folder = tmp_path_factory.mktemp("bf16")
    save(ARCHITECTURES["olmoe"], folder / "model", vocab_size=304, max_position_embeddings=96)
    done = run("export", folder / "model", "-o", folder / "out", "--precision", "bf16")
    assert done.code == 0, done.err
    return Bundle.open(folder / "out")


def with_given_choices(bundle: Bundle) -> tuple[Session, GivenSession, dict[str, str]]:
    """Returns a session that observes its choices, one that gets them, and their names."""
    (graph,) = bundle.manifest.graphs
    chosen = dict(graph.selected)
    observe = dict.fromkeys(chosen.values(), onnx.TensorProto.INT64)
    free = Session(bundle.path / graph.file, SessionOptions(observe=observe))
    given = free.with_given_choices(chosen.values())
    assert given is not None
    return free, given, chosen


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_with_given_choices_a_graph_computes_what_pytorch_computes_with_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(ARCHITECTURES[name], tmp_path / "model")
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", lowering="dense")
    free, given, chosen = with_given_choices(bundle)
    y = free.run({"input_ids": IDS}, outputs=[*free.output_names, *chosen.values()])
    feeds: dict[str, Any] = {"input_ids": IDS}
    for value in chosen.values():
        own = y[value].reshape(2, 7, -1)
        feeds[given_choice(value)] = own
    again = given.run(feeds)
    first = free.output_names[0]
    np.testing.assert_allclose(again[first], y[first], rtol=1e-5, atol=1e-6)
    for value in chosen.values():
        np.testing.assert_array_equal(again[own_choice(value)], y[value])

    # The first token chooses experts 0, 1, … in the first layer, in both.
    value = next(iter(chosen.values()))
    feeds[given_choice(value)][0, 0] = np.arange(feeds[given_choice(value)].shape[-1])
    free_topk, given_sets = torch.topk, [feeds[given_choice(v)] for v in chosen.values()]
    left = list(map(torch.from_numpy, given_sets))

    def topk(scores: torch.Tensor, k: int, *rest: Any, **more: Any) -> Any:
        if left and k == left[0].shape[-1] and scores.shape[-1] == 8:
            index = left.pop(0).reshape(*scores.shape[:-1], k)
            return torch.return_types.topk((scores.gather(-1, index), index))
        return free_topk(scores, k, *rest, **more)

    monkeypatch.setattr(torch, "topk", topk)
    network = Library(ARCHITECTURES[name], folder).model
    with torch.no_grad():
        expected = network(torch.from_numpy(IDS)).logits
    assert not left
    other = given.run(feeds)[first]
    assert np.abs(other - y[first])[0].max() > 1e-3
    np.testing.assert_allclose(other, expected.numpy(), rtol=1e-4, atol=1e-5)


def compared(
    bundle: Bundle, reference: Reference, folder: Path | None = None, batch: int = 3
) -> Parity:
    manifest, (graph,) = bundle.manifest, bundle.manifest.graphs
    observe = reference.observed(graph.selected)
    comparison = Comparison(
        checking_session((folder or bundle.path) / graph.file, manifest.target, observe=observe),
        graph.selected,
        batch=batch,
        tolerance=stored_bounds(graph.parity, "bf16"),
    )
    comparison.add(reference)
    return comparison.parity()


def damaged(bundle: Bundle, folder: Path, damage: Callable[[list[onnx.NodeProto]], None]) -> Path:
    """Returns a copy of a bundle with a change after its first router: TopK is the last node."""
    shutil.copytree(bundle.path, folder)
    (graph,) = bundle.manifest.graphs
    content = onnx.load(folder / graph.file, load_external_data=False)
    choice, nodes = next(iter(graph.selected.values())), list[onnx.NodeProto]()
    for node in content.graph.node:
        nodes.append(node)
        if choice in node.output:
            damage(nodes)
    del content.graph.node[:]
    content.graph.node.extend(nodes)
    onnx.save(content, folder / graph.file)
    return folder


def test_experts_in_an_order_that_their_weights_do_not_have_are_found(
    bf16: Bundle, tmp_path: Path
) -> None:
    def damage(nodes: list[onnx.NodeProto]) -> None:
        top = nodes[-1]
        value, top.output[1] = top.output[1], "unsorted"
        sort = partial(helper.make_node, "TopK", axis=-1, largest=0)
        nodes.append(sort(["unsorted", top.input[1]], [value, "positions"]))

    reference = replace(Reference.load(bf16.path / "parity.npz"), rounded=None)
    assert not compared(bf16, reference, damaged(bf16, tmp_path / "out", damage)).passed


def test_a_token_with_the_worst_experts_is_found(bf16: Bundle, tmp_path: Path) -> None:
    """It is one choice in a hundred, fewer than may differ."""

    def damage(nodes: list[onnx.NodeProto]) -> None:
        top = nodes.pop()
        scores, weights = top.input[0], top.output[0]
        numbers = {"first": np.array([0]), "firsts": np.array([[0]])}
        for name, array in numbers.items():
            tensor = onnx.numpy_helper.from_array(array, name)
            nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        nodes.append(helper.make_node("Gather", [scores, "first"], ["token"], axis=0))
        nodes.append(helper.make_node("Neg", ["token"], ["reversed"]))
        nodes.append(helper.make_node("ScatterND", [scores, "firsts", "reversed"], ["wrong"]))
        top.input[0], top.output[0] = "wrong", "wrong weights"
        nodes.append(top)
        gathered = [scores, top.output[1]]
        nodes.append(helper.make_node("GatherElements", gathered, [weights], axis=-1))

    reference = Reference.load(bf16.path / "parity.npz")
    assert not compared(bf16, reference, damaged(bf16, tmp_path / "out", damage), batch=8).passed


def test_tokens_after_a_tie_are_compared_with_pytorchs_choices(bf16: Bundle) -> None:
    parity = Parity.of(bf16.manifest.graphs[0].parity or {})
    assert parity.given_choices and parity.passed
    assert parity.all_max_rel is not None
    assert parity.max_rel < parity.bounds.rtol < parity.all_max_rel
    done = run("verify", bf16.path)
    assert done.code == 0, done.out
    assert "with PyTorch's choices; max |difference|" in done.out


def test_an_error_in_a_token_after_a_tie_is_found(bf16: Bundle) -> None:
    reference = Reference.load(bf16.path / "parity.npz")
    assert compared(bf16, reference).passed
    damaged = reference.y.copy()
    damaged[:, -1] *= 1.3  # as if the graph computed the last token wrongly
    parity = compared(bf16, replace(reference, y=damaged))
    assert not parity.passed
    assert not parity.given_choices


def test_a_wrong_choice_is_found_with_given_choices(bf16: Bundle) -> None:
    """Experts far apart in score are swapped in one of twenty choices."""
    reference = Reference.load(bf16.path / "parity.npz")
    selected = {name: sets.copy() for name, sets in reference.selected.items()}
    margin = {name: gaps.copy() for name, gaps in reference.margin.items()}
    for name, sets in selected.items():
        sets[:, 0] = [6, 7]
        margin[name][:, 0] = 0.5
    parity = compared(bf16, replace(reference, selected=selected, margin=margin))
    assert not parity.passed
