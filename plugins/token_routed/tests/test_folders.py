"""Folders of `transformers`: every key of every file is used, or named with its probable origin.

The expected values are the library's in float64, for a folder with weights computed here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import CheckpointError, FamilyError, MoexportError
from moexport.exporter.model import Model
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save, transformers
from moexport.tests.command import run
from safetensors.torch import load_file, save_file
from torch import Tensor

MIXTRAL = ARCHITECTURES["mixtral"]
Weights = dict[str, Tensor]
Change = Callable[[Weights], Weights]

LAYER = "model.layers.1."
Q, V = f"{LAYER}self_attn.q_proj", f"{LAYER}self_attn.v_proj"
EXPERT = f"{LAYER}block_sparse_moe.experts.3."


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(MIXTRAL, tmp_path_factory.mktemp("mixtral") / "model")


def write(weights: Weights, file: Path) -> None:
    tensors = {key: tensor.clone().contiguous() for key, tensor in weights.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def changed(folder: Path, to: Path, change: Change, **config: Any) -> Path:
    """A copy of a folder with other weights and another configuration."""
    shutil.copytree(folder, to)
    weights = load_file(folder / "model.safetensors")
    write(
        change({key: tensor.clone() for key, tensor in weights.items()}), to / "model.safetensors"
    )
    content = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**content, **config}))
    return to


def check_same(model: Model, right: Path) -> None:
    """The loaded model returns the same as the library for another folder, in float64."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 61, (3, 9)))
    library = transformers.MixtralForCausalLM.from_pretrained(
        right, dtype=torch.float64, experts_implementation="eager"
    )
    loaded: Any = model.module
    with torch.no_grad():
        wanted = library(input_ids=ids, use_cache=False).logits
        given = loaded.wrapped(input_ids=ids, use_cache=False).logits
    assert float((given - wanted).abs().max() / wanted.abs().max()) < 2e-6


def refused(place: Path, *words: str) -> None:
    """The error of loading has each of the words in its message or hint, and not a generic hint."""
    with pytest.raises(MoexportError) as caught:
        moexport.load(place)
    text = f"{caught.value.message} {caught.value.hint}"
    for word in words:
        assert word in text, text
    assert "copy or download the folder again" not in text


# --- scales ------------------------------------------------------------------------------------


def quantised(weight: Tensor, blocks: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in eight bits, a scale of each block, and their product in float64."""
    o, i = weight.shape
    counts = -(-o // blocks[0]), -(-i // blocks[1])
    scales = np.random.default_rng(o * i).uniform(0.001, 0.01, counts).astype(np.float32)
    spread = np.kron(scales.astype(np.float64), np.ones(blocks))[:o, :i]
    packed = (weight.double() / torch.from_numpy(spread)).to(torch.float8_e4m3fn)
    return packed, torch.from_numpy(scales), packed.double() * torch.from_numpy(spread)


@pytest.mark.parametrize(
    ("blocks", "end", "shape"),
    [
        ((10**3, 10**3), "_scale", lambda s: s.reshape(())),
        ((10**3, 10**3), "_scale_inv", lambda s: s.reshape(1)),
        ((1, 10**3), "_scale", lambda s: s),
        ((1, 10**3), "_scale", lambda s: s.reshape(-1)),
        ((8, 8), "_scale_inv", lambda s: s),
        ((128, 8), "_scale_inv", lambda s: s),
    ],
    ids=["tensor", "one", "rows", "rows-flat", "blocks", "last-block-short"],
)
def test_weights_of_eight_bits_are_multiplied_by_their_scales(
    blocks: tuple[int, int],
    end: str,
    shape: Callable[[Tensor], Tensor],
    mixtral: Path,
    tmp_path: Path,
) -> None:
    meant: Weights = {}

    def change(weights: Weights) -> Weights:
        out: Weights = {}
        for key, weight in weights.items():
            meant[key] = out[key] = weight
            if weight.ndim == 2 and ("proj" in key or ".experts." in key):
                out[key], scales, meant[key] = quantised(weight, blocks)
                out[key + end] = shape(scales)
                out[key.replace("weight", "input_scale")] = torch.ones(1)
        return out

    folder = changed(mixtral, tmp_path / "fp8", change, dtype="bfloat16")
    right = changed(mixtral, tmp_path / "right", lambda _: meant)
    model = moexport.load(folder)
    check_same(model, right)
    assert any("by their scales" in note for note in model.notes)
    content = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": list(blocks)}
    content["quantization_config"] = method
    (folder / "config.json").write_text(json.dumps(content))
    check_same(moexport.load(folder), right)


@pytest.mark.parametrize("blocks", [(24, 16), (16, 12), (12, 24)])
def test_blocks_that_are_no_powers_of_two_are_those_of_the_configuration(
    blocks: tuple[int, int], mixtral: Path, tmp_path: Path
) -> None:
    meant: Weights = {}

    def change(weights: Weights) -> Weights:
        packed, scales, meant[Q] = quantised(weights[f"{Q}.weight"], blocks)
        return {**weights, f"{Q}.weight": packed, f"{Q}.weight_scale_inv": scales}

    method = {"quant_method": "fp8", "weight_block_size": list(blocks)}
    folder = changed(mixtral, tmp_path / "fp8", change, quantization_config=method)
    right = changed(mixtral, tmp_path / "right", lambda w: {**w, f"{Q}.weight": meant[Q]})
    check_same(moexport.load(folder), right)
    method = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    refused(changed(mixtral, tmp_path / "8", change, quantization_config=method), "block of 8 × 8")


def test_a_number_of_blocks_that_leaves_their_length_open_is_refused(
    mixtral: Path, tmp_path: Path
) -> None:
    def change(weights: Weights) -> Weights:
        key = f"{EXPERT}w1.weight"  # 24 rows: twice 12, or 16 and 8
        scales = {f"{key}_scale": torch.tensor([[0.1], [0.2]])}
        return {**weights, key: weights[key].to(torch.float8_e4m3fn), **scales}

    refused(changed(mixtral, tmp_path / "fp8", change), "it is unclear which part of")


def test_scales_of_a_type_that_is_not_read_are_refused(mixtral: Path, tmp_path: Path) -> None:
    scales = torch.ones(1).to(torch.float8_e8m0fnu)
    folder = changed(mixtral, tmp_path / "fp8", lambda w: _packed(w, weight_scale=scales))
    refused(folder, f"{Q}.weight_scale is of type float8_e8m0fnu", "save it as float32")


def test_weights_that_are_quantised_otherwise_are_refused(mixtral: Path, tmp_path: Path) -> None:
    method = {"quant_method": "mxfp4"}
    folder = changed(mixtral, tmp_path / "fp4", dict, quantization_config=method)
    refused(folder, "already quantised", "bfloat16")


def _packed(weights: Weights, **more: Tensor) -> Weights:
    weight = weights[f"{Q}.weight"].to(torch.float8_e4m3fn)
    return {**weights, f"{Q}.weight": weight, **{f"{Q}.{k}": t for k, t in more.items()}}


# --- factors of adapters -----------------------------------------------------------------------

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
RANK = 4


def factors(weights: Weights) -> Weights:
    """Random factors of two modules, by peft's keys in a separate file."""
    generator = torch.Generator().manual_seed(0)
    found: Weights = {}
    for module in (Q, V):
        o, i = weights[f"{module}.weight"].shape
        found[f"{module}.lora_A.weight"] = torch.randn(RANK, i, generator=generator) / 4
        found[f"{module}.lora_B.weight"] = torch.randn(o, RANK, generator=generator) / 4
    return found


def with_adapter(weights: Weights, scale: float) -> Weights:
    """W + scale · B A, element by element."""
    pairs, out = factors(weights), {key: tensor.double() for key, tensor in weights.items()}
    for module in (Q, V):
        a, b = (pairs[f"{module}.lora_{which}.weight"].double() for which in "AB")
        out[f"{module}.weight"] += scale * torch.einsum("or,ri->oi", b, a)
    return out


def beside(weights: Weights, folder: Path) -> Weights:
    adapter = {f"base_model.model.{key}": tensor for key, tensor in factors(weights).items()}
    write(adapter, folder / "adapter_model.safetensors")
    return weights


def within(weights: Weights, _: Path) -> Weights:
    named = {k.replace(".weight", ".default.weight"): t for k, t in factors(weights).items()}
    base = {
        k.replace("_proj.weight", "_proj.base_layer.weight"): weights[k]
        for k in map("{}.weight".format, (Q, V))
    }
    rest = {k: t for k, t in weights.items() if k not in (f"{Q}.weight", f"{V}.weight")}
    return {f"base_model.model.{k}": t for k, t in {**rest, **base, **named}.items()}


def loralib(weights: Weights, _: Path) -> Weights:
    return {**weights, **{k.removesuffix(".weight"): t for k, t in factors(weights).items()}}


@pytest.mark.parametrize("place", [beside, within, loralib])
@pytest.mark.parametrize(("more", "scale"), [({}, 6 / 4), ({"use_rslora": True}, 6 / 2)])
def test_lora_factors_are_merged_as_peft_merges_them(
    place: Any, more: dict[str, Any], scale: float, mixtral: Path, tmp_path: Path
) -> None:
    folder = changed(mixtral, tmp_path / "lora", lambda w: w)
    write(place(load_file(folder / "model.safetensors"), folder), folder / "model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **more}))
    model = moexport.load(folder)
    check_same(model, changed(mixtral, tmp_path / "right", lambda w: with_adapter(w, scale)))
    assert any("merged the LoRA adapter" in note for note in model.notes)
    # The merged files are hashed: a change to one makes another model.
    names = {file.name for file in model.source.files}
    own = {"adapter_model.safetensors"} if place is beside else set()
    assert names == {"model.safetensors", "adapter_config.json"} | own


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, ("use_dora", "merge the adapter first")),
        ({"alpha_pattern": {"q_proj": 3}}, ("alpha_pattern",)),
        ({"init_lora_weights": "pissa"}, ("init_lora_weights",)),
        ({"bias": "all"}, ("bias",)),
        ({"peft_type": "IA3"}, ("IA3",)),
        ({"fan_in_fan_out": True}, ("fan_in_fan_out",)),
        ({"lora_alpha": None}, ("lora_alpha is None",)),
        ({"r": 3}, ("rank 3 do not fit",)),
    ],
)
def test_an_adapter_of_another_rule_is_refused_by_the_field_that_says_so(
    config: dict[str, Any], words: tuple[str, ...], mixtral: Path, tmp_path: Path
) -> None:
    folder = changed(mixtral, tmp_path / "lora", lambda w: w)
    beside(load_file(folder / "model.safetensors"), folder)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    refused(folder, *words)


# --- what does not fit -------------------------------------------------------------------------


def _left_out(part: str) -> Change:
    return lambda weights: {key: t for key, t in weights.items() if part not in key}


def _more(**more: Tensor) -> Change:
    return lambda w: {**w, **{key.replace("__", "."): tensor for key, tensor in more.items()}}


def _nan(key: str) -> Change:
    def change(weights: Weights) -> Weights:
        weights[key].view(-1)[3] = float("nan")
        return weights

    return change


ODD: dict[str, tuple[Change, tuple[str, ...]]] = {
    "bias": (lambda w: {**w, f"{Q}.bias": torch.ones(32)}, (f"{Q}.bias", "bias that this network")),
    "ema": (
        lambda w: {**w, **{f"ema.{key}": t + 1 for key, t in w.items()}},
        ("ema.", "moving average"),
    ),
    "two names": (
        lambda w: {**w, **{k[6:]: t + 1 for k, t in w.items() if k.startswith("model.")}},
        ("embed_tokens.weight", "of one weight"),
    ),
    "scale": (
        lambda w: {**w, f"{Q}.weight_scale": torch.ones(1)},
        (f"{Q}.weight_scale", "quantised", "bfloat16"),
    ),
    "no scale": (_packed, (f"{Q}.weight is float8_e4m3fn and has no scales",)),
    "two scales": (
        lambda w: _packed(w, weight_scale=torch.ones(1), weight_scale_inv=torch.ones(1)),
        ("two tensors of scales",),
    ),
    "scales of no blocks": (
        lambda w: _packed(w, weight_scale=torch.ones(3, 5)),
        (f"{Q}.weight_scale", "[3, 5]"),
    ),
    "gptq": (
        lambda w: {**_left_out("q_proj")(w), f"{Q}.qweight": torch.ones(4, 32, dtype=torch.int32)},
        (f"{Q}.qweight", "quantised", "is missing"),
    ),
    "integers": (
        lambda w: {**w, f"{Q}.weight": torch.ones(32, 32, dtype=torch.int8)},
        (f"{Q}.weight has integers (int8)",),
    ),
    "lora without alpha": (
        lambda w: {**w, **factors(w)},
        ("adapter_config.json", "merge the adapter first"),
    ),
    "one factor": (
        lambda w: {**w, f"{Q}.lora_A.weight": torch.ones(4, 32)},
        (f"{Q}.lora_A.weight", "one factor"),
    ),
    "dora": (
        lambda w: {**w, f"{Q}.lora_magnitude_vector.weight": torch.ones(32)},
        (f"{Q}.lora_magnitude_vector.weight", "adapter"),
    ),
    "resized embeddings": (
        lambda w: {
            **w,
            **{k: torch.ones(64, 32) for k in w if k.endswith(("tokens.weight", "head.weight"))},
        },
        ("[64, 32]", '"vocab_size": 64'),
    ),
    "one expert": (_left_out(EXPERT), (f"{EXPERT}w1.weight is missing", "7 other experts")),
    "one matrix of an expert": (_left_out(f"{EXPERT}w2"), (f"{EXPERT}w2.weight is missing",)),
    "the last expert of a layer": (
        _left_out(EXPERT.replace("3", "7")),
        (f"{LAYER}mlp.experts.", "all experts of the layer"),
    ),
    "the last expert of all": (_left_out(".experts.7."), ('"num_local_experts": 7',)),
    "a layer more": (
        lambda w: {**w, **{k.replace("layers.1", "layers.2"): t for k, t in w.items()}},
        ("model.layers.2.", "config.json has only 2 layers"),
    ),
    "no head": (_left_out("lm_head"), ("lm_head.weight", "architectures")),
    "another prefix": (
        lambda w: {f"teacher.{k}": t for k, t in w.items()},
        ("teacher.lm_head.weight", "its keys then lack teacher."),
    ),
    "a prefix of the head's module": (
        lambda w: {f"transformer.{k}": t for k, t in w.items()},
        ("no parameter transformer.lm_head.weight (and ", "more); lm_head.weight is missing"),
    ),
    "a router": (
        _left_out(f"{LAYER}block_sparse_moe.gate"),
        (f"{LAYER}mlp.gate.weight", "save the weights and config.json together"),
    ),
    "no second layer": (_left_out(LAYER), ("config.json describes more layers",)),
    "an optimiser": (
        lambda w: {**w, "optimizer.state.0.exp_avg": torch.ones(4)},
        ("a part of the training state", "save only the network"),
    ),
    "beyond float32": (
        lambda w: {**w, "model.norm.weight": torch.full((32,), 1e300, dtype=torch.float64)},
        ("model.norm.weight contains numbers that are infinite in float32",),
    ),
    "nan": (_nan(f"{Q}.weight"), (f"{Q}.weight contains NaN",)),
    "nan in a rare expert": (_nan(f"{EXPERT}w2.weight"), (f"{EXPERT}w2.weight contains NaN",)),
    "nan in a scale": (
        lambda w: _packed(w, weight_scale=torch.tensor(float("nan"))),
        (f"{Q}.weight_scale contains NaN",),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_key_that_does_not_fit_is_named_with_what_it_looks_like(
    name: str, mixtral: Path, tmp_path: Path
) -> None:
    change, words = ODD[name]
    refused(changed(mixtral, tmp_path / "odd", change), *words)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {f"module.{k}": t for k, t in w.items()},
        lambda w: {f"_orig_mod.module.{k}": t for k, t in w.items()},
        lambda w: {k.replace("layers.1.", "layers.1._orig_mod."): t for k, t in w.items()},
        lambda w: {k.replace("mlp", "_fsdp_wrapped_module.mlp"): t for k, t in w.items()},
        lambda w: {f"model.{k}": t for k, t in w.items()},
        lambda w: {**w, f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4)},
    ],
)
def test_names_that_training_put_around_a_network_are_removed(
    change: Change, mixtral: Path, tmp_path: Path
) -> None:
    check_same(moexport.load(changed(mixtral, tmp_path / "named", change)), mixtral)


def test_layers_that_predict_further_tokens_are_left_out_with_a_note(
    mixtral: Path, tmp_path: Path
) -> None:
    def change(weights: Weights) -> Weights:
        further = {"mtp.layers.0.norm.weight": torch.ones(3)}
        return {**weights, **further, "model.layers.2.eh_proj.weight": torch.ones(3, 6)}

    model = moexport.load(changed(mixtral, tmp_path / "mtp", change))
    check_same(model, mixtral)
    (note,) = [note for note in model.notes if note.startswith("left out 2 weights")]
    assert "mtp.layers.0." in note
    assert "model.layers.2." in note


def test_a_key_of_a_layer_that_the_network_has_is_no_surplus_of_its_class(tmp_path: Path) -> None:
    """GLM's class ignores the keys of its layers 46 and 92, for any number of layers."""
    folder = save(ARCHITECTURES["glm4_moe"], tmp_path / "model")
    ignored = transformers.Glm4MoeForCausalLM._keys_to_ignore_on_load_unexpected
    assert any("46" in pattern for pattern in ignored)
    key = "model.layers.46.self_attn.q_proj.bias"
    beyond = changed(folder, tmp_path / "beyond", lambda w: {**w, key: torch.ones(3)})
    assert any("left out 1 weights" in note for note in moexport.load(beyond).notes)
    deep = save(ARCHITECTURES["glm4_moe"], tmp_path / "deep", num_hidden_layers=47)
    refused(changed(deep, tmp_path / "odd", lambda w: {**w, f"{key}_copy": torch.ones(3)}), key)


def test_wider_numbers_among_many_narrow_ones_are_kept(mixtral: Path, tmp_path: Path) -> None:
    def change(weights: Weights) -> Weights:
        return {k: t if k == f"{Q}.weight" else t.bfloat16() for k, t in weights.items()}

    folder = changed(mixtral, tmp_path / "mixed", change, dtype="bfloat16")
    check_same(moexport.load(folder), folder)


def test_a_token_of_padding_that_only_the_class_names_is_told(tmp_path: Path) -> None:
    folder = save(ARCHITECTURES["openai_privacy_filter"], tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    del content["pad_token_id"]
    (folder / "config.json").write_text(json.dumps(content))
    refused(folder, "pad_token_id is 199999 by default", "null")


def test_a_class_of_images_and_text_is_refused_with_its_text_part(
    mixtral: Path, tmp_path: Path
) -> None:
    folder = changed(
        mixtral, tmp_path / "vl", dict, architectures=["Qwen3VLMoeForConditionalGeneration"]
    )
    with pytest.raises(FamilyError, match="its input is more than text") as caught:
        moexport.load(folder)
    assert "language_model" in str(caught.value.hint)


# --- which files -------------------------------------------------------------------------------


def sharded(folder: Path, weights: Weights, listed: list[str] | None = None) -> None:
    """Weights as two shards and their index, which lists some of the keys."""
    keys = sorted(weights)
    placed = {key: f"part-{keys.index(key) % 2}.safetensors" for key in keys}
    for name in set(placed.values()):
        write({k: t for k, t in weights.items() if placed[k] == name}, folder / name)
    index = {"weight_map": {key: placed[key] for key in listed or keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_file_next_to_an_index_of_other_shards_is_ambiguous(
    mixtral: Path, tmp_path: Path
) -> None:
    folder = changed(mixtral, tmp_path / "both", lambda w: {k: t + 1 for k, t in w.items()})
    sharded(folder, load_file(mixtral / "model.safetensors"))
    refused(folder, "model.safetensors and model.safetensors.index.json could both be the weights")
    index = folder / "model.safetensors.index.json"
    model = moexport.load(index)
    check_same(model, mixtral)
    assert sorted(file.name for file in model.source.files) == [
        "part-0.safetensors", "part-1.safetensors"
    ]  # fmt: skip
    assert moexport.load(folder / "model.safetensors").source.files == (
        folder / "model.safetensors",
    )


def test_every_key_of_a_shard_counts_whether_the_index_lists_it_or_not(
    mixtral: Path, tmp_path: Path
) -> None:
    folder = changed(mixtral, tmp_path / "shards", lambda w: w)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    extra = {**weights, f"{Q}.bias": torch.ones(32)}
    sharded(folder, extra, sorted(weights))
    refused(folder, f"{Q}.bias")
    sharded(folder, weights)
    check_same(moexport.load(folder), mixtral)
    write({**load_file(folder / "part-0.safetensors"), **load_file(folder / "part-1.safetensors")},
          folder / "part-1.safetensors")  # fmt: skip
    refused(folder, "is also in another shard")


@pytest.mark.parametrize(
    "name",
    ["ema.safetensors", "pytorch_lora_weights.safetensors", "model.fp16.safetensors", "ema.pt"],
)
def test_weights_that_would_not_be_read_are_named(name: str, mixtral: Path, tmp_path: Path) -> None:
    folder = changed(mixtral, tmp_path / "stray", lambda w: w)
    write({"a": torch.ones(2)}, folder / name)
    refused(folder, name, "not read")
    check_same(moexport.load(folder / "model.safetensors"), mixtral)


def test_a_configuration_of_an_adapter_without_its_factors_is_told(
    mixtral: Path, tmp_path: Path
) -> None:
    folder = changed(mixtral, tmp_path / "left", lambda w: w)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    refused(folder, "describes an adapter", "remove the file")
    check_same(moexport.load(folder / "model.safetensors"), mixtral)


def test_an_adapter_alone_is_told_as_one(mixtral: Path, tmp_path: Path) -> None:
    folder = changed(mixtral, tmp_path / "alone", lambda w: w)
    beside(load_file(folder / "model.safetensors"), folder)
    (folder / "model.safetensors").unlink()
    refused(folder, "an adapter, but the weights of its base model")


OPENED = """
import json, os, sys
opened = set()
sys.addaudithook(lambda event, args: opened.add(args[0]) if event == "open" else None)
import moexport
root, folder = sys.argv[1:]
model = moexport.load(folder)
names = {os.path.realpath(os.fspath(n)) for n in opened if isinstance(n, (str, bytes, os.PathLike))}
if os.path.exists("/proc/self/maps"):  # the library maps files of safetensors past Python
    names |= {line.split()[-1] for line in open("/proc/self/maps")}
weights = {n for n in names if n.startswith(root) and not n.endswith("config.json")}
print(json.dumps([sorted(weights), sorted(map(str, model.source.files))]))
"""


@pytest.mark.slow
def test_the_weights_that_are_opened_are_those_that_are_hashed(
    mixtral: Path, tmp_path: Path
) -> None:
    """Files that a configuration or an adapter names are not opened."""
    root = tmp_path.resolve()
    shutil.copytree(mixtral, root / "elsewhere")
    folder = changed(mixtral, root / "model", dict, transformers_weights="other.safetensors")
    write(load_file(mixtral / "model.safetensors"), folder / "other.safetensors")
    refused(folder, "other.safetensors", "not read")
    (folder / "other.safetensors").unlink()
    beside(load_file(folder / "model.safetensors"), folder)
    config = {**CONFIG, "base_model_name_or_path": str(root / "elsewhere")}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    result = subprocess.run(
        [sys.executable, "-c", OPENED, root, folder], capture_output=True, text=True, check=True
    )
    opened, hashed = json.loads(result.stdout)
    assert opened == [name for name in hashed if not name.endswith("adapter_config.json")]
    assert len(opened) == 2


# --- a setting of training ---------------------------------------------------------------------


def test_a_cache_that_training_turned_off_is_exported_with_a_note(
    mixtral: Path, tmp_path: Path
) -> None:
    folder = changed(mixtral, tmp_path / "trained", lambda w: w, use_cache=False)
    model = moexport.load(folder)
    assert any(port.name.startswith("past_key_values") for port in model.inputs)
    assert any('"use_cache": false in config.json' in note for note in model.notes)
    alone = moexport.load(folder, sets=["use_cache=false"])
    assert [port.name for port in alone.inputs] == ["input_ids", "attention_mask"]
    assert not any("use_cache" in note for note in alone.notes)


def test_the_command_line_names_a_key_and_leaves_nothing(mixtral: Path, tmp_path: Path) -> None:
    folder = changed(mixtral, tmp_path / "odd", _nan(f"{EXPERT}w2.weight"))
    outcome = run("export", folder, "-o", tmp_path / "out")
    assert outcome.code == 1
    assert f"{EXPERT}w2.weight contains NaN" in outcome.error
    assert not (tmp_path / "out").exists()


def test_a_file_without_its_configuration_is_still_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    write({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises((CheckpointError, FamilyError)):
        moexport.load(tmp_path / "model.safetensors")
