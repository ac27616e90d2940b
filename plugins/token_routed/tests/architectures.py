"""Small models from `transformers` with random weights, and how each is compared with the library.

Together they have every option of the experts' layer. A case is a class, its configuration and a
second one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.session import Session, SessionOptions

transformers: Any = pytest.importorskip(
    "transformers", reason="the extra transformers is not installed"
)

RTOL = 1e-4
BATCH, STEPS = 3, (6, 3, 1)
"""Inputs, and the tokens of each step; all differ from the trace, 2 inputs of 7 after 5."""

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers`, a small configuration, and the changes for a second one."""

    type: str
    name: str
    config: Mapping[str, Any]
    second: Mapping[str, Any] = field(default_factory=dict)
    cached: bool = True

    def settings(self, second: bool) -> dict[str, Any]:
        return {**SMALL, **self.config, **(self.second if second else {})}


_EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

_DEEPSEEK_MLA = {
    **_DEEPSEEK,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    each.type: each
    for each in (
        Architecture(
            "mixtral",
            "MixtralForCausalLM",
            _LOCAL,
            {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 1},
        ),
        Architecture(
            "olmoe",
            "OlmoeForCausalLM",
            {**_EIGHT, "hidden_act": "gelu"},
            {"hidden_act": "relu", "norm_topk_prob": True, "num_experts_per_tok": 8},
        ),
        Architecture(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {**_EIGHT, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20},
            {"hidden_act": "gelu_pytorch_tanh", "num_experts": 5},
        ),
        Architecture(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {**_EIGHT, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True},
            {"mlp_only_layers": [0], "num_experts_per_tok": 3},
        ),
        Architecture(
            "granitemoe",
            "GraniteMoeForCausalLM",
            _LOCAL,
            {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
        ),
        Architecture(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            _DEEPSEEK_MLA,
            {"n_group": 4, "topk_group": 2, "q_lora_rank": None, "routed_scaling_factor": 1.0},
        ),
        Architecture(
            "deepseek_v32",
            "DeepseekV32ForCausalLM",
            # Enough heads that no two scores of the indexer are sums of zeros.
            {
                **_DEEPSEEK_MLA,
                "head_dim": 4,
                "index_topk": 3,
                "index_n_heads": 16,
                "index_head_dim": 8,
            },
            {"n_group": 4, "topk_group": 2, "index_topk": 5},
            cached=False,
        ),
        Architecture(
            "gpt_oss",
            "GptOssForCausalLM",
            {**_LOCAL, "head_dim": 8, "sliding_window": 4, "swiglu_limit": 0.3},
            {"num_experts_per_tok": 4, "swiglu_limit": 7.0},
        ),
        Architecture(
            "phimoe",
            "PhimoeForCausalLM",
            {**_LOCAL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"num_local_experts": 4, "lm_head_bias": True, "attention_bias": True},
        ),
        Architecture(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            {**_DEEPSEEK, "n_group": 1, "head_dim": 8},
            {"use_qk_norm": True, "n_group": 2, "first_k_dense_replace": 0},
        ),
        Architecture(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16},
            {"moe_layer_start_index": 0, "moe_k": 3, "use_bias": True},
        ),
        Architecture(
            "nemotron_h",
            "NemotronHForCausalLM",
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "moe_shared_expert_intermediate_size": 20,
                "layers_block_type": ["attention", "moe"],
                "head_dim": 8,
            },
            {"moe_latent_size": 24, "layers_block_type": ["moe", "attention", "moe"]},
            cached=False,
        ),
        Architecture(
            "aria_text",
            "AriaTextForCausalLM",
            {"moe_num_experts": 8, "moe_topk": 2},
            {"hidden_act": "quick_gelu", "moe_topk": 1},
        ),
        Architecture(
            "openai_privacy_filter",
            "OpenAIPrivacyFilterForTokenClassification",
            {**_LOCAL, "head_dim": 8, "sliding_window": 4, "swiglu_limit": 0.3},
            {"num_experts_per_tok": 3, "num_labels": 5},
            cached=False,
        ),
        Architecture(
            "muse_spark_text",
            "MuseSparkTextModel",
            {
                **_LOCAL,
                "head_dim": 8,
                "moe_intermediate_size": 16,
                "moe_hidden_size": 24,
                "sliding_window": 4,
            },
            {"num_experts_per_tok": 5},
            cached=False,
        ),
    )
}


_LINEAR = {
    **_EIGHT,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

UNUSUAL: Mapping[str, Architecture] = {
    each.type: each
    for each in (
        ARCHITECTURES["deepseek_v32"],
        Architecture(
            "kimi_linear",
            "KimiLinearForCausalLM",
            {
                **_LINEAR,
                "num_key_value_heads": 4,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "mlp_layer_types": ["dense", "sparse"],
            },
        ),
        Architecture(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            {
                **_LINEAR,
                "shared_expert_intermediate_size": 20,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
        ),
        Architecture(
            "jamba",
            "JambaForCausalLM",
            {
                **_EIGHT,
                "attn_layer_offset": 0,
                "attn_layer_period": 2,
                "mamba_dt_rank": 4,
                "mamba_d_state": 8,
            },
        ),
        Architecture("minimax", "MiniMaxForCausalLM", {**_LOCAL, "head_dim": 8}),
    )
}
"""Models whose cache contains more than keys and values."""


def save(architecture: Architecture, folder: Path, *, second: bool = False, **more: Any) -> Path:
    """Writes a model with random weights that are large enough for every part to matter."""
    torch.manual_seed(1 if second else 0)
    config = transformers.AutoConfig.for_model(
        architecture.type, **{**architecture.settings(second), **more}
    )
    model = getattr(transformers, architecture.name)(config).eval()
    random_weights(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def random_weights(model: torch.nn.Module) -> None:
    """Fills a model's matrices and biases, in place; norms stay as they are."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        elif "norm" not in name:
            weight.normal_(0, 0.1)


class Library:
    """The model as the library runs it, with the inputs of its experts."""

    def __init__(self, architecture: Architecture, folder: Path, **config: Any) -> None:
        class_ = getattr(transformers, architecture.name)
        self.model = class_.from_pretrained(folder, dtype=torch.float32, **config).eval()
        self.chosen: dict[str, np.ndarray] = {}
        for name, module in self.model.named_modules():
            if hasattr(module, "is_concatenated"):
                module.register_forward_pre_hook(self._record(name), with_kwargs=True)

    def _record(self, name: str) -> Any:
        def record(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            index = (*args, *given.values())[1]
            self.chosen[name] = index.sort(dim=-1).values.numpy()

        return record

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        found = self.model(**inputs)
        y = found["logits"] if "logits" in found else found["last_hidden_state"]
        return y.numpy(), found


def session_of(bundle: Bundle) -> Session:
    """The graph with the inputs of its layers as further outputs."""
    chosen = bundle.manifest.graphs[0].selected.values()
    observe = dict.fromkeys(chosen, onnx.TensorProto.INT64)
    return bundle.session(options=SessionOptions(observe=observe))


def check_values(y: np.ndarray, expected: np.ndarray) -> None:
    assert y.shape == expected.shape
    assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


def check_chosen(values: Mapping[str, np.ndarray], bundle: Bundle, library: Library) -> None:
    selected = bundle.manifest.graphs[0].selected
    for layer, chosen in library.chosen.items():
        if layer in selected:  # a layer that uses all its experts chooses nothing
            assert np.array_equal(np.sort(values[selected[layer]], axis=-1), chosen), layer


def without_cache(architecture: Architecture, folder: Path, out: Path, **options: Any) -> Bundle:
    """Exports a model without a cache and compares it at sizes that were not traced."""
    model = moexport.load(folder, config={"use_cache": False})
    bundle = moexport.export(model, out, **options)
    library, session = Library(architecture, folder), session_of(bundle)
    random = np.random.default_rng(0)
    for batch, tokens in ((BATCH, 9), (1, 1)):
        ids = random.integers(0, SMALL["vocab_size"], (batch, tokens))
        mask = np.ones_like(ids)
        mask[1:, 6:] = 0
        values = session.run({"input_ids": ids, "attention_mask": mask})
        expected, _ = library(
            input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), use_cache=False
        )
        check_values(values[session.output_names[0]], expected)
        check_chosen(values, bundle, library)
    return bundle


def with_cache(architecture: Architecture, folder: Path, out: Path, **options: Any) -> Bundle:
    """Exports a model with its cache and compares it step by step, as a text is generated."""
    model = moexport.load(folder)
    assert len(model.inputs) > 3
    bundle = moexport.export(model, out, **options)
    check_steps(bundle, Library(architecture, folder))
    return bundle


def check_steps(bundle: Bundle, library: Library) -> None:
    session, random = session_of(bundle), np.random.default_rng(0)
    past: dict[str, np.ndarray] = {}
    cache = transformers.DynamicCache(config=library.model.config)
    seen = 0
    for tokens in STEPS:
        ids = random.integers(0, SMALL["vocab_size"], (BATCH, tokens))
        values = session.run({"input_ids": ids, **past})
        expected, _ = library(
            input_ids=torch.from_numpy(ids), past_key_values=cache, use_cache=True
        )
        check_values(values["logits"], expected)
        check_chosen(values, bundle, library)
        seen += tokens
        past = {
            name.replace("present", "past_key_values"): value
            for name, value in values.items()
            if name.startswith("present.")
        }
        assert all(each.shape[2] == seen for each in past.values())
