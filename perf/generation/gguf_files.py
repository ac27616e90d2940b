"""Writes the model in a transformers folder as a GGUF file for llama.cpp, with the same weights.

All matrices except the router's become blocks of 32 weights with a scale, including the embedding
and the head, as with `--quantize all`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

GGUFType = Literal["F32", "Q8_0", "Q4_0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFForm:
    """The name of an architecture in llama.cpp, and the checkpoint's names of a layer's experts.

    If `interleaved`, its rotary embedding rotates neighbours instead of halves as in transformers,
    so the rows of queries and keys are reordered. `hidden` is the configuration's field for an
    expert's width, `merged` the name of all experts of a layer together in gguf's list of names.
    """

    name: str
    experts: str
    merged: str
    hidden: str
    interleaved: bool


FORMS: Mapping[str, GGUFForm] = {
    "qwen3_moe": GGUFForm(
        name="qwen3moe",
        experts="mlp.experts",
        merged="model.layers.{}.mlp.experts.{}",
        hidden="moe_intermediate_size",
        interleaved=False,
    ),
    "mixtral": GGUFForm(
        name="llama",
        experts="block_sparse_moe.experts",
        merged="layers.{}.feed_forward.experts.{}",
        hidden="intermediate_size",
        interleaved=True,
    ),
}
"""The forms by the `model_type` in `config.json`."""


def write_gguf(folder: Path, file: Path, kind: GGUFType) -> None:
    """Writes the model in a folder, in blocks of 8 or 4 bits or in FP32."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    form = FORMS[config["model_type"]]
    writer = gguf.GGUFWriter(file, form.name)
    _write_sizes(writer, config, form)
    architecture = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[form.name]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    quantised, plain = gguf.GGMLQuantizationType[kind], gguf.GGMLQuantizationType.F32
    for name, weight in _weights(folder, config, form).items():
        stem = name.removesuffix(".weight")
        known = names.get_name(stem)
        if known is None:
            raise ValueError(f"{folder}: GGUF has no name for {name}")
        large = weight.ndim > 1 and "ffn_gate_inp" not in known
        type_ = quantised if large else plain
        values = gguf.quants.quantize(weight.float().numpy(), type_)
        writer.add_tensor(f"{known}.weight", values, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: Mapping[str, Any], form: GGUFForm) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    experts = config.get("num_experts") or config["num_local_experts"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config[form.hidden])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")  # the input is tokens


def _weights(folder: Path, config: Mapping[str, Any], form: GGUFForm) -> dict[str, Tensor]:
    """Returns the checkpoint's weights, with those of a layer's experts as one tensor."""
    found: dict[str, Tensor] = {}
    pattern = rf"model\.layers\.(\d+)\.{re.escape(form.experts)}\.(\d+)\.(.*)"
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as archive:
            for name in archive.keys():  # noqa: SIM118  # not a mapping
                weight, match = archive.get_tensor(name), re.fullmatch(pattern, name)
                if match is not None:
                    experts[form.merged.format(match[1], match[3])][int(match[2])] = weight
                elif form.interleaved and re.search(r"\.[qk]_proj\.", name):
                    kind = "num_attention_heads" if ".q_" in name else "num_key_value_heads"
                    found[name] = _interleaved(weight, config[kind])
                else:
                    found[name] = weight
    for name, by_expert in experts.items():
        found[name] = torch.stack([by_expert[each] for each in sorted(by_expert)])
    return found


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Returns rows [heads·w, d] in an order in which pairs that rotate together are neighbours."""
    rows = weight.reshape(heads, 2, -1, weight.shape[-1])
    return rows.transpose(1, 2).reshape(weight.shape)
