"""Inputs that tie are compared with PyTorch's choices as inputs of the graph."""

from __future__ import annotations

from dataclasses import replace

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.given_choices import given_choice
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
    choices = {given_choice(graph.selected[n]): sets[:, None] for n, sets in selected.items()}
    y = given.run({given.input_name: reference.x, **choices})[given.output_names[0]]
    assert (np.abs(y - reference.y).reshape(len(y), -1).max(axis=1)[1:] > 0).all()
    return replace(reference, y=y, selected=selected, rounded=None)


def compared(bundle: Bundle, reference: Reference, tolerance: Tolerance) -> Parity:
    graph, target = bundle.manifest.graphs[0], bundle.manifest.target
    observe = reference.observed(graph.selected)
    session = checking_session(bundle.path / graph.file, target, observe=observe)
    comparison = Comparison(session, graph.selected, batch=3, tolerance=tolerance)
    comparison.add(reference)
    return comparison.parity()


def test_if_most_inputs_tie_all_are_compared_with_pytorchs_choices(bundle: Bundle) -> None:
    reference, tolerance = tied(bundle), replace(TOLERANCES["fp32"], tie=1e-2)
    parity = compared(bundle, reference, tolerance)
    assert parity.passed, describe(parity)
    assert parity.given_choices
    assert parity.tied >= parity.samples - 1
    assert parity.compared == parity.samples
    assert "NOT COMPARED" not in describe(parity)

    # One input that ties has wrong outputs.
    wrong = reference.y.copy()
    wrong[5] *= 1.01
    assert not compared(bundle, replace(reference, y=wrong), tolerance).passed


def test_choices_between_experts_far_apart_are_found_with_given_choices(bundle: Bundle) -> None:
    parity = compared(bundle, tied(bundle), TOLERANCES["fp32"])
    assert not parity.passed
    assert parity.routing_agreement < 0.5
