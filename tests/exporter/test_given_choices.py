"""Inputs that tie are compared with PyTorch's choices as inputs of the graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.parity import (
    TOLERANCES,
    Comparison,
    Parity,
    Reference,
    Tolerance,
    describe,
)
from moexport.exporter.bundle.verify import checking_session
from moexport.exporter.session import Session

TIES = replace(TOLERANCES["fp32"], tie=1e-2)

DIM, HIDDEN, DEPTH, EXPERTS, TOKENS, PATCH = 24, 8, 4, 32, 17, 8


def vit() -> dict[str, torch.Tensor]:
    """A ViT with pairs of experts whose scores hardly differ: an odd k parts one of them."""
    torch.manual_seed(0)
    state = {
        "cls_token": torch.randn(1, 1, DIM),
        "pos_embed": torch.randn(1, TOKENS, DIM),
        "patch_embed.proj.weight": torch.randn(DIM, 3, PATCH, PATCH) / PATCH,
        "patch_embed.proj.bias": torch.zeros(DIM),
    }

    def norm(name: str) -> None:
        state.update({f"{name}.weight": torch.ones(DIM), f"{name}.bias": torch.zeros(DIM)})

    def linear(name: str, out: int, width: int) -> None:
        state[f"{name}.weight"] = torch.randn(out, width) / width**0.5
        state[f"{name}.bias"] = torch.zeros(out)

    for index in range(DEPTH):
        block = f"blocks.{index}"
        norm(f"{block}.norm1")
        norm(f"{block}.norm2")
        linear(f"{block}.attn.qkv", 3 * DIM, DIM)
        linear(f"{block}.attn.proj", DIM, DIM)
        mlps = [f"{block}.mlp.experts.{e}" for e in range(EXPERTS)] if index else [f"{block}.mlp"]
        for mlp in mlps:
            linear(f"{mlp}.fc1", HIDDEN, DIM)
            linear(f"{mlp}.fc2", DIM, HIDDEN)
        if index:
            pairs = torch.randn(DIM, EXPERTS // 2, 1).repeat_interleave(2, dim=1)
            state[f"{block}.mlp.phi"] = pairs + 1e-4 * torch.randn(DIM, EXPERTS, 1)
            state[f"{block}.mlp.scale"] = torch.tensor([8.0])
    norm("norm")
    linear("head", 10, DIM)
    return state


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("vit")
    torch.save(vit(), folder / "vit.pt")
    model = moexport.load(folder / "vit.pt", config={"num_heads": 2, "rest": "default"})
    return moexport.export(model, folder / "out", k=7, lowering="gather")


def tied(bundle: Bundle) -> Reference:
    """Returns a reference whose first layer keeps the other expert of a pair, in most inputs."""
    reference, graph = Reference.load(bundle.path / "parity.npz"), bundle.manifest.graphs[0]
    first = next(iter(reference.selected))
    selected = {name: chosen.copy() for name, chosen in reference.selected.items()}
    for chosen in selected[first][1:]:
        (parted,) = (e for e in chosen if e ^ 1 not in chosen)
        chosen[chosen == parted] = parted ^ 1
        chosen.sort()
    given = Session(bundle.path / graph.file).with_given_choices(graph.selected.values())
    assert given is not None
    choices = given.inputs_for({graph.selected[n]: sets for n, sets in selected.items()})
    y = given.run({given.input_name: reference.x, **choices})[given.output_names[0]]
    assert (np.abs(y - reference.y).reshape(len(y), -1).max(axis=1)[1:] > 0).all()
    return replace(reference, y=y, selected=selected, rounded=None)


@dataclass
class Damaged:
    """A session whose outputs are changed, with its own choices and with given ones."""

    session: Any
    change: Callable[[np.ndarray], np.ndarray]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run(self, *args: Any, **named: Any) -> dict[str, np.ndarray]:
        values, first = self.session.run(*args, **named), self.session.output_names[0]
        return {**values, first: self.change(values[first])}

    def with_given_choices(self, values: Iterable[str]) -> Damaged:
        return Damaged(self.session.with_given_choices(values), self.change)


def compared(
    bundle: Bundle,
    *references: Reference,
    tolerance: Tolerance = TIES,
    folder: Path | None = None,
    change: Callable[[np.ndarray], np.ndarray] = np.copy,
    probed: tuple[int, ...] = (),
) -> Parity:
    graph, target = bundle.manifest.graphs[0], bundle.manifest.target
    file = (folder or bundle.path) / graph.file
    session = checking_session(file, target, observe=references[0].observed(graph.selected))
    comparison = Comparison(
        Damaged(session, change), graph.selected, batch=3, tolerance=tolerance, probed=probed
    )
    for reference in references:
        comparison.add(reference)
    return comparison.parity()


def test_if_most_inputs_tie_all_are_compared_with_pytorchs_choices(bundle: Bundle) -> None:
    reference = tied(bundle)
    parity = compared(bundle, reference)
    assert parity.passed, describe(parity)
    assert parity.given_choices
    assert parity.tied >= parity.samples - 1
    assert parity.compared == parity.samples
    assert "NOT COMPARED" not in describe(parity)

    # One input that ties has wrong outputs.
    wrong = reference.y.copy()
    wrong[5] *= 1.01
    assert not compared(bundle, replace(reference, y=wrong)).passed


def test_choices_between_experts_far_apart_are_found_with_given_choices(bundle: Bundle) -> None:
    parity = compared(bundle, tied(bundle), tolerance=TOLERANCES["fp32"])
    assert not parity.passed
    assert parity.routing_agreement < 0.5


def test_a_router_that_keeps_the_smallest_scores_is_refused_if_pytorchs_scores_tie(
    bundle: Bundle, tmp_path: Path
) -> None:
    shutil.copytree(bundle.path, tmp_path / "damaged")
    graph = bundle.manifest.graphs[0]
    content = onnx.load(tmp_path / "damaged" / graph.file, load_external_data=False)
    for node in content.graph.node:
        for attribute in node.attribute:
            if node.op_type == "TopK" and attribute.name == "largest":
                attribute.i = 0
    onnx.save(content, tmp_path / "damaged" / graph.file)
    reference = replace(Reference.load(bundle.path / "parity.npz"), rounded=None)
    wide = replace(TOLERANCES["int8"], tie=max(map(np.max, reference.margin.values())))
    assert not compared(bundle, reference, tolerance=wide, folder=tmp_path / "damaged").passed


def test_a_batch_size_at_which_a_graph_is_wrong_is_found_if_all_inputs_tie(bundle: Bundle) -> None:
    reference = tied(bundle)
    reference = reference.rows(np.arange(1, len(reference.x)))
    assert compared(bundle, reference, probed=(1, 5)).passed

    def change(y: np.ndarray) -> np.ndarray:
        return y[::-1].copy() if len(y) == 5 else y

    assert not compared(bundle, reference, probed=(1, 5), change=change).passed


@pytest.mark.parametrize("first", [0, 1])
def test_inputs_that_match_do_not_hide_later_or_earlier_ones_that_do_not(
    bundle: Bundle, first: int
) -> None:
    reference = tied(bundle)
    reference = reference.rows(np.arange(1, len(reference.x)))
    wrong = reference.y * np.where(np.arange(reference.y.shape[1]) == 0, 1.5, 1.0)
    parts = [reference, replace(reference, y=wrong.astype(np.float32))]
    assert not compared(bundle, parts[first], parts[1 - first]).passed


def test_outputs_that_are_not_numbers_are_refused_whatever_the_choices(bundle: Bundle) -> None:
    reference = tied(bundle)
    assert not compared(bundle, reference, change=lambda y: y * np.nan).passed
