"""The PyTorch reference of token-routed experts against a formula, and against transformers."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from moexport.graphs.edits import Ablation, Edits
from moexport.graphs.layers.base import recorded_choices
from moexport.plugins.token_routed.layers.experts import Experts, ExpertsSpec, ExpertsWeights
from moexport.plugins.token_routed.tests.experts_layers import (
    PLAIN,
    SPECS,
    computed,
    error,
    experts,
    formula,
    routed,
)

N, D, H = 6, 16, 24


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("name", list(SPECS))
def test_every_option_is_the_formula(name: str, biases: bool) -> None:
    layer = experts(SPECS[name], biases=biases)
    inputs = routed(layer.spec, 9)
    assert error(computed(layer, *inputs), formula(layer, *inputs)) < 1e-5


def test_a_narrower_index_is_a_smaller_k() -> None:
    layer = experts(replace(PLAIN, k=4))
    inputs = routed(layer.spec, 5, k=1)
    assert error(computed(layer, *inputs), formula(layer, *inputs)) < 1e-5


def test_no_tokens_give_no_rows() -> None:
    layer = experts(PLAIN)
    assert computed(layer, *routed(PLAIN, 0)).shape == (0, PLAIN.out)


def test_weights_may_be_transposed_views_or_lie_apart() -> None:
    inputs = routed(PLAIN, 7)
    y = computed(experts(PLAIN), *inputs)
    for layer in (experts(PLAIN, transposed=True), experts(PLAIN, apart=True)):
        assert error(computed(layer, *inputs), y) < 1e-6
    view = experts(PLAIN, transposed=True)
    assert isinstance(view.w1, torch.Tensor) and not view.w1.is_contiguous()


def test_weights_of_16_bits_are_computed_with_in_the_type_of_the_tokens() -> None:
    layer, inputs = experts(PLAIN, dtype=torch.bfloat16), routed(PLAIN, 7)
    assert error(computed(layer, *inputs), formula(layer, *inputs)) < 1e-5


def arrays(layer: Experts) -> dict[str, np.ndarray]:
    return {part.name: np.stack(list(part.parts)) for part in layer.stored()}


def test_what_is_stored_has_the_shapes_it_says() -> None:
    for spec in SPECS.values():
        layer = experts(spec, biases=True, dtype=torch.bfloat16)
        shapes = {part.name: part.shape for part in layer.stored()}
        assert {name: array.shape for name, array in arrays(layer).items()} == shapes
        assert {array.dtype for array in arrays(layer).values()} == {np.dtype(np.float32)}


def test_gate_and_up_are_stored_one_after_the_other() -> None:
    layer = experts(replace(PLAIN, gate="interleaved"), biases=True)
    stored, h = arrays(layer), PLAIN.hidden
    assert isinstance(layer.w1, torch.Tensor) and layer.b1 is not None
    assert np.array_equal(stored["experts.w1"][..., :h], layer.w1[..., ::2].numpy())
    assert np.array_equal(stored["experts.w1"][..., h:], layer.w1[..., 1::2].numpy())
    assert np.array_equal(stored["experts.b1"][..., h:], layer.b1[..., 1::2].numpy())


def test_the_scale_of_a_post_norm_is_stored_in_the_second_matrix() -> None:
    spec = replace(PLAIN, post_norm=True)
    layer, inputs = experts(spec, biases=True), routed(PLAIN, 5)
    stored = {name: torch.from_numpy(array) for name, array in arrays(layer).items()}
    w1, w2, b1, b2 = (stored[f"experts.{w}"] for w in ("w1", "w2", "b1", "b2"))
    folded = Experts(spec, ExpertsWeights(w1, w2, b1, b2))
    assert error(computed(folded, *inputs), computed(layer, *inputs)) < 1e-6


def test_an_ablated_expert_contributes_nothing() -> None:
    layer, inputs = experts(PLAIN, biases=True), routed(PLAIN, 8)
    x, index, weights = inputs
    layer.edits = Edits((Ablation("", 3),))
    expected = formula(layer, x, index, np.where(index == 3, 0.0, weights).astype(np.float32))
    assert error(computed(layer, *inputs), expected) < 1e-5
    assert not arrays(layer)["experts.w2"][3].any() and not arrays(layer)["experts.b2"][3].any()


def test_what_was_chosen_is_recorded_ascending() -> None:
    layer, (x, index, weights) = experts(PLAIN), routed(PLAIN, 4)
    with recorded_choices(torch.nn.ModuleDict({"moe": layer})) as records:
        computed(layer, x, index, weights)
    assert np.array_equal(records["moe"].chosen.numpy(), np.sort(index, axis=1))
    assert torch.isinf(records["moe"].margin).all()


def test_its_work_in_numbers() -> None:
    spec = SPECS["other widths"]
    assert spec.parameters_per_expert == 12 * 16 + 8 * 20
    assert spec.macs(5, 2) == {"experts": 10 * 352, "combine": 10 * 20}
    assert (spec.bytes_read(2), spec.levels, spec.slots) == (8 * 352, (6,), 1)


CONFIG = SimpleNamespace(
    num_local_experts=N,
    num_experts=N,
    n_routed_experts=N,
    moe_num_experts=N,
    hidden_size=D,
    moe_hidden_size=D,
    moe_latent_size=None,
    intermediate_size=H,
    moe_intermediate_size=H,
    hidden_act="silu",
    mlp_hidden_act="relu2",
    post_norm_eps=1e-4,
    swiglu_alpha=1.702,
    swiglu_limit=0.75,
    _experts_implementation="eager",
)
"""The names of the same sizes in the configurations of all these architectures."""

CLAMPED: dict[str, Any] = {"alpha": 1.702, "limit": 0.75, "up_offset": 1.0}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralExperts", {}),
    "qwen3_moe": ("Qwen3MoeExperts", {}),
    "olmoe": ("OlmoeExperts", {}),
    "granitemoe": ("GraniteMoeExperts", {}),
    "deepseek_v3": ("DeepseekV3Experts", {}),
    "gpt_oss": ("GptOssExperts", {"gate": "interleaved", **CLAMPED}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterExperts", CLAMPED),
    "minimax_m3_vl": ("MiniMaxM3VLExperts", CLAMPED),
    "deepseek_v4": ("DeepseekV4Experts", {"limit": 0.75}),
    "muse_spark": ("MuseSparkExperts", {"post_norm": True, "post_norm_eps": 1e-4}),
    "nemotron_h": ("NemotronHExperts", {"gate": "none", "activation": "relu2"}),
    "aria": ("AriaExperts", {}),
}
"""By architecture: its experts' class, and the fields of our spec."""


@pytest.mark.parametrize("architecture", list(PUBLISHED))
def test_the_experts_of_an_architecture_of_transformers(architecture: str) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra")
    module = f"transformers.models.{architecture}.modeling_{architecture}"
    name, options = PUBLISHED[architecture]
    torch.manual_seed(0)
    published = getattr(importlib.import_module(module), name)(CONFIG)
    with torch.no_grad():
        for parameter in published.parameters():
            parameter.normal_(std=0.3)
    spec = ExpertsSpec("experts", N, 2, D, H, D, **options)
    assert published.is_concatenated == (spec.gate != "interleaved")
    assert published.has_gate == (spec.gate != "none")
    assert published.has_post_expert_norm == spec.post_norm
    layer = Experts(spec, weights_of(published))
    x, index, weights = (torch.from_numpy(each) for each in routed(spec, 11))
    with torch.no_grad():
        expected = published(x, index, weights)
        actual = layer(x, index, weights)
    assert error(actual.numpy(), expected.numpy()) < 1e-5


def weights_of(published: Any) -> ExpertsWeights:
    w1, w2 = (
        published.gate_up_proj if published.has_gate else published.up_proj,
        published.down_proj,
    )
    if not published.is_transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    b1, b2 = (
        (published.gate_up_proj_bias, published.down_proj_bias)
        if published.has_bias
        else (None, None)
    )
    scale = 1.0 + published.post_expert_norm.weight if published.has_post_expert_norm else None
    return ExpertsWeights(w1, w2, b1, b2, scale)
