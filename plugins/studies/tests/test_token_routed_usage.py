"""How language models use their experts: f, P and the balance loss, as the library computes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.checks.drift import NAME
from moexport.plugins.studies.usage.count import Usage
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save
from moexport.plugins.token_routed.tests.encoder_decoders import ENCODER_DECODERS
from moexport.plugins.token_routed.tests.encoder_decoders import save as save_pair
from moexport.tests.command import run

transformers: Any = pytest.importorskip("transformers")

IDS = np.random.default_rng(0).integers(0, 61, (5, 9))
MASK = np.ones_like(IDS)
MASK[1, 6:] = MASK[3, 2:] = 0


@contextmanager
def results_of(network: torch.nn.Module, kind: str) -> Iterator[list[Any]]:
    """Records within the context the results of the modules of a class, in order."""
    seen: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda *made: seen.append(made[2]))
        for module in network.modules()
        if type(module).__name__.endswith(kind)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def used(folder: Path) -> Usage:
    data = {"input_ids": IDS, "attention_mask": MASK}
    found = moexport.specialise(moexport.load(folder), data)
    assert found.usage is not None and found.accuracy == ()
    return found.usage


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "phimoe"])
def test_the_balance_loss_is_that_of_the_library(name: str, tmp_path: Path) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    folder = save(ARCHITECTURES[name], tmp_path / "model")
    network = getattr(transformers, ARCHITECTURES[name].name).from_pretrained(folder).eval()
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    with torch.no_grad(), results_of(network, "Router") as results:
        network(input_ids=ids, attention_mask=mask)
    found = used(folder)
    assert len(found.layers) == len(results) == 2
    for layer, (logits, *_) in zip(found.layers, results, strict=True):
        wanted = load_balancing_loss_func((logits.float(),), layer.experts, layer.k, mask)
        assert layer.balance_loss == pytest.approx(float(wanted), rel=1e-5)
        p = logits.double().softmax(dim=-1).numpy()[MASK.ravel() == 1].mean(axis=0)
        assert layer.probabilities == pytest.approx(p.tolist(), rel=1e-5)
        assert layer.of == MASK.sum()
        assert sum(layer.chosen or ()) == pytest.approx(layer.k)


def test_a_router_of_sigmoids_has_their_shares_as_probabilities(tmp_path: Path) -> None:
    folder = save(ARCHITECTURES["deepseek_v3"], tmp_path / "model")
    network = transformers.DeepseekV3ForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad(), results_of(network, "TopkRouter") as results:
        network(input_ids=torch.from_numpy(IDS), attention_mask=torch.from_numpy(MASK))
    (layer,), ((logits, weights, index),) = used(folder).layers, results
    real = MASK.ravel() == 1
    s = logits.double().sigmoid().numpy()[real]
    p = (s / s.sum(axis=1, keepdims=True)).mean(axis=0)
    f = np.eye(8)[index.numpy()[real]].sum(axis=1).mean(axis=0)
    assert layer.probabilities == pytest.approx(p.tolist(), rel=1e-5)
    assert layer.chosen == pytest.approx(f.tolist())
    assert layer.balance_loss == pytest.approx(8 * float(f @ p), rel=1e-5)
    gates = np.zeros((real.sum(), 8))
    np.put_along_axis(gates, index.numpy()[real], weights.double().numpy()[real], axis=1)
    assert layer.gates == pytest.approx(gates.mean(axis=0).tolist(), rel=1e-5)


def test_what_a_switch_s_capacity_leaves_out_counts_for_the_expert_that_was_chosen(
    tmp_path: Path,
) -> None:
    folder = save_pair(ENCODER_DECODERS["switch_transformers"], tmp_path / "model")
    name = ENCODER_DECODERS["switch_transformers"].name
    network = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad(), results_of(network.encoder, "Top1Router") as results:
        network.encoder(input_ids=torch.from_numpy(IDS))
    ((mask, _, logits),) = results
    p = logits.double().softmax(dim=-1).reshape(-1, 4).numpy()
    chosen = np.eye(4)[p.argmax(axis=1)]
    lost = chosen * (mask.reshape(-1, 4).sum(dim=1) == 0).numpy()[:, None]
    model = moexport.load(folder, sets=["part=encoder"])
    found = moexport.specialise(model, {"input_ids": IDS})
    assert found.usage is not None and found.inputs == len(IDS)
    (layer,) = found.usage.layers
    assert layer.chosen == pytest.approx(chosen.mean(axis=0).tolist())
    assert layer.balance_loss == pytest.approx(4 * float(chosen.mean(0) @ p.mean(0)), rel=1e-5)
    assert layer.dropped == layer.uncomputed == pytest.approx(float(lost.sum()) / len(p))
    assert lost.any() and layer.overflow is not None
    of = chosen.sum(axis=0)
    assert layer.overflow == tuple(
        pytest.approx(lost[:, e].sum() / of[e]) if of[e] else None for e in range(4)
    )


def test_a_language_model_s_experts_are_told_from_text_ids_and_a_smaller_k(tmp_path: Path) -> None:
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    np.savez(tmp_path / "x.npz", input_ids=IDS, attention_mask=MASK)
    command = ("specialise", folder, "--data", tmp_path / "x.npz")
    outcome = run(*command, "--k", "1", "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert "balance loss" in outcome.out and "1 of 8" in outcome.out
    layers = json.loads((tmp_path / "out" / "specialise.json").read_text())["usage"]
    assert [sum(layer["chosen"]) for layer in layers] == pytest.approx([1, 1])
    refused = run(*command, "--layer", "model.layers.0.mlp.experts")
    assert refused.code == 2 and "no expert can be removed" in refused.error
    several = run(*command[:2], folder, *command[2:])
    assert several.code == 0 and several.out.count("balance loss: E") == 2


@pytest.mark.slow
def test_texts_of_other_words_are_found_to_drift(tmp_path: Path) -> None:
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    random = np.random.default_rng(1)
    for name, most in (("export", 61), ("same", 61), ("other", 6)):
        np.savez(tmp_path / f"{name}.npz", input_ids=random.integers(0, most, (64, 12)))
    moexport.export(
        moexport.load(folder),
        tmp_path / "out",
        data=tmp_path / "export.npz",
        precision="int8",
        target="ort-cpu",
        tokens=12,
    )
    same = run("verify", tmp_path / "out", "--data", tmp_path / "same.npz")
    other = run("verify", tmp_path / "out", "--data", tmp_path / "other.npz")
    assert f"ok      {NAME}: no drift" in same.out and same.code == 0
    assert f"noted   {NAME}: DRIFTED" in other.out and other.code == 0
    assert "in layer model.layers.0.mlp.experts" in other.out
