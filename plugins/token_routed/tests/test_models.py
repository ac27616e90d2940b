"""Models of `transformers` are exported and compared with the library."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import (
    CheckpointError,
    FamilyError,
    FeedError,
    MissingExtraError,
    MoexportError,
    TraceError,
    UsageError,
)
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import TensorSpec
from moexport.exporter.bundle.parity import TIE
from moexport.exporter.checkpoints import floats
from moexport.exporter.inputs import completed
from moexport.exporter.model import Model
from moexport.exporter.trace import VALID_SIZES, ValidSizes, trace
from moexport.graphs.layers.margins import routed_margins
from moexport.plugins.token_routed.experts import canonical, check_layer, experts_modules
from moexport.plugins.token_routed.tests.architectures import (
    ARCHITECTURES,
    UNUSUAL,
    Library,
    check_chosen,
    check_steps,
    check_values,
    save,
    session_of,
    transformers,
    with_cache,
    without_cache,
)
from moexport.tests.command import run
from safetensors.torch import load_file, save_file

MIXTRAL = ARCHITECTURES["mixtral"]


@pytest.mark.slow
def test_a_hybrid_that_works_in_chunks_is_right_for_any_number_of_them(tmp_path: Path) -> None:
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    folder = save(
        ARCHITECTURES["nemotron_h"],
        tmp_path / "model",
        layers_block_type=["mamba", "moe"],
        chunk_size=16,
        **mamba,  # type: ignore[arg-type]
    )
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", tokens="1:20:64")
    assert bundle.manifest.tokens == "1:20:64"
    network = Library(ARCHITECTURES["nemotron_h"], folder).model
    session = bundle.session()
    for tokens in (1, 16, 17, 32, 33, 64):
        ids = np.random.default_rng(tokens).integers(0, 61, (2, tokens))
        with torch.no_grad():
            y = network(torch.from_numpy(ids), use_cache=False).logits.numpy()
        assert np.abs(session({"input_ids": ids}) - y).max() <= 1e-4 * np.abs(y).max(), tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h", "muse_spark_text", "olmoe"])
def test_an_architecture_gives_the_values_and_the_experts_of_the_library(
    name: str, tmp_path: Path
) -> None:
    """Interleaved, transposed, biased and clamped; without a gate; with a norm after; gelu."""
    architecture = ARCHITECTURES[name]
    folder = save(architecture, tmp_path / "model")
    compare = with_cache if architecture.cached else without_cache
    compare(architecture, folder, tmp_path / "out")


@pytest.mark.slow
def test_padding_on_the_left_gives_numbers_where_a_norm_adds_very_little(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["muse_spark_text"]  # adds 1e-8
    folder = save(architecture, tmp_path / "model")
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", tokens="1:12:16")
    ids, mask = np.random.default_rng(0).integers(0, 61, (2, 12)), np.ones((2, 12), np.int64)
    mask[1, :5] = 0
    ours = bundle.session()({"input_ids": ids, "attention_mask": mask})
    network = Library(architecture, folder).model
    with torch.no_grad():
        theirs = network(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    theirs = theirs.last_hidden_state.numpy()
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(MIXTRAL, tmp_path_factory.mktemp("mixtral") / "model")


@pytest.fixture(scope="module")
def bundle(mixtral: Path) -> Bundle:
    """Three experts in the first layer and one in the second, instead of the trained two."""
    model = moexport.load(mixtral)
    return moexport.export(model, mixtral.parent / "out", k=[3, 1])


def test_k_of_each_layer_is_what_its_router_chooses(mixtral: Path, bundle: Bundle) -> None:
    assert [layer.k for layer in bundle.manifest.layers] == [3, 1]
    library = Library(MIXTRAL, mixtral)
    for layer, k in zip(library.model.model.layers, (3, 1), strict=True):
        layer.mlp.gate.top_k = layer.mlp.top_k = k
    check_steps(bundle, library)


@pytest.mark.slow
def test_one_k_is_the_model_whose_configuration_says_so(mixtral: Path, tmp_path: Path) -> None:
    model = moexport.load(mixtral, config={"use_cache": False})
    out = moexport.export(model, tmp_path / "out", k=0.5)
    assert {layer.k for layer in out.manifest.layers} == {1}
    library, session = Library(MIXTRAL, mixtral, num_experts_per_tok=1), session_of(out)
    ids = np.arange(24).reshape(2, 12)
    values = session.run(ids)
    expected, _ = library(input_ids=torch.from_numpy(ids), use_cache=False)
    check_values(values["logits"], expected)
    check_chosen(values, out, library)
    assert model.module.routers.trained == 2  # type: ignore[union-attr]  # as it was loaded
    assert moexport.export(model, tmp_path / "trained").manifest.layers[0].k == 2


@pytest.mark.slow
def test_fixed_tokens_leave_out_what_has_a_default(mixtral: Path, tmp_path: Path) -> None:
    """An axis is then a sum with a constant, `past + 5`, also for a mask that is left out."""
    out = moexport.export(moexport.load(mixtral), tmp_path / "out", tokens=5)
    shapes = {port.name: port.shape for port in out.manifest.inputs}
    assert shapes["attention_mask"] == ("batch", "past + 5")
    ids = np.arange(10).reshape(2, 5)
    np.savez(tmp_path / "x.npz", input_ids=ids)
    done = run("run", out.path, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert done.code == 0, done.err
    expected, _ = Library(MIXTRAL, mixtral)(input_ids=torch.from_numpy(ids))
    with np.load(tmp_path / "y.npz") as arrays:
        check_values(arrays["logits"], expected)


def test_a_cache_with_fixed_tokens_is_within_the_models_positions() -> None:
    ports = [
        TensorSpec("ids", "int64", ("batch", 5)),
        TensorSpec("mask", "int64", ("batch", "past + 5"), {"past + 5": 8}, default="ones"),
        TensorSpec("cache", "float32", ("batch", "past"), default="empty"),
    ]
    ids = np.zeros((2, 5), np.int64)
    given = completed({"ids": ids, "cache": np.zeros((2, 3), np.float32)}, ports)
    assert given["mask"].shape == (2, 8)
    with pytest.raises(FeedError, match="has 4 tokens and 5 more are given"):
        completed({"ids": ids, "cache": np.zeros((2, 4), np.float32)}, ports)


def test_a_trace_tells_for_what_sizes_it_holds(mixtral: Path) -> None:
    valid: ValidSizes = trace(moexport.load(mixtral)).meta[VALID_SIZES]
    assert valid.bounds == dict.fromkeys(("batch", "tokens", "past"), (1, None))
    assert valid.guards


@pytest.mark.path
def test_a_bundle_verifies_runs_and_tells_what_it_is(bundle: Bundle, tmp_path: Path) -> None:
    assert all(check.passed for check in bundle.verify())
    names = [port.name for port in bundle.manifest.inputs]
    assert names[:4] == ["input_ids", "attention_mask", "position_ids", "past_key_values.0.key"]
    assert [port.name for port in bundle.manifest.outputs][:2] == ["logits", "present.0.key"]
    ids = np.arange(20).reshape(4, 5)
    mask = np.ones_like(ids)
    mask[0, :2] = 0
    np.savez(tmp_path / "x.npz", input_ids=ids, attention_mask=mask)
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    done = run("run", bundle.path, *files, "--batch-size", "3")
    assert done.code == 0, done.err
    y = np.load(tmp_path / "y.npz")["logits"]
    expected = bundle.session()({"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    readme = (bundle.path / "README.md").read_text()
    program = readme.partition("```python\n")[2].partition("```")[0]
    place: dict[str, object] = {}
    exec(program.replace('"model.onnx"', repr(str(bundle.path / "model.onnx"))), place)
    assert place["y"].shape == (1, 1, 61)  # type: ignore[attr-defined]


def test_further_outputs_that_a_configuration_asks_for_are_left_out(tmp_path: Path) -> None:
    asked = {"output_router_logits": True, "output_hidden_states": True}
    folder = save(MIXTRAL, tmp_path / "model", **asked, return_dict=False)
    bundle = moexport.export(moexport.load(folder), tmp_path / "out")
    assert [port.name for port in bundle.manifest.outputs][:2] == ["logits", "present.0.key"]
    ignored = f"ignored {', '.join(sorted(asked))} in config.json"
    assert any(note.startswith(ignored) for note in bundle.manifest.notes)
    check_steps(bundle, Library(MIXTRAL, folder, return_dict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_cache_of_more_than_keys_and_values_is_left_out_with_a_note(
    name: str, tmp_path: Path
) -> None:
    """The keys of an indexer, states of a convolution or of linear attention."""
    model = moexport.load(save(UNUSUAL[name], tmp_path / "model"))
    assert [each.name for each in model.inputs] == ["input_ids", "attention_mask"]
    assert (
        "exported without a cache, because that contains more than keys and values" in model.notes
    )


@pytest.mark.parametrize("name", ["jamba", "qwen3_next"])
def test_a_loop_over_the_tokens_is_refused_before_it_is_traced(name: str, tmp_path: Path) -> None:
    """Loops over tokens, or over blocks of 64: a graph would fit only the traced number."""
    model = moexport.load(save(UNUSUAL[name], tmp_path / "model"))
    with pytest.raises(TraceError, match="loops over its tokens") as told:
        moexport.export(model, tmp_path / "out")
    assert "tokens=N" in str(told.value.hint)
    assert not (tmp_path / "out").exists()


def test_tokens_that_an_indexer_or_a_group_left_out_make_no_tie(tmp_path: Path) -> None:
    for name in ("deepseek_v3", "deepseek_v32"):
        folder = save(ARCHITECTURES[name], tmp_path / name)
        model = moexport.load(folder, config={"use_cache": False})
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 61, (3, 9)))
        mask = torch.ones_like(ids)
        mask[1, 6:] = 0
        with routed_margins(model.module) as margins, torch.no_grad():
            model.module(ids, mask)
        assert margins and all((each > TIE).all() for each in margins.values()), name


def test_what_is_left_out_of_the_inputs_has_its_default(bundle: Bundle) -> None:
    session, ids = bundle.session(), np.arange(10).reshape(2, 5)
    both = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    np.testing.assert_array_equal(session(ids), session(both))
    with pytest.raises(MoexportError, match="the model has no input 'token_type_ids'"):
        session({"input_ids": ids, "token_type_ids": ids})
    with pytest.raises(MoexportError, match="'input_ids' is missing"):
        session({"attention_mask": ids})


def test_inspect_tells_the_layers_without_reading_weights(mixtral: Path) -> None:
    told = run("inspect", mixtral, "--json")
    assert told.code == 0, told.err
    report = json.loads(told.out)
    assert report["family"] == "mixtral"
    assert [layer["experts"] for layer in report["layers"]] == [8, 8]
    assert report["config"]["num_experts_per_tok"] == 2
    costs = {cost["k"]: cost for cost in report["costs"]}
    assert list(costs) == ["n = 8", "trained k = 2", "trained k/2 = 1"]
    assert costs["trained k = 2"]["bytes_share"] == 0.25


def test_int8_experts_need_no_data(mixtral: Path, tmp_path: Path) -> None:
    model = moexport.load(mixtral, config={"use_cache": False})
    out = moexport.export(model, tmp_path / "out", precision="int8", target="ort-cpu")
    assert out.manifest.parity is not None
    assert out.manifest.parity["routing_agreement"] > 0.98
    assert out.manifest.parity["chosen_by"] == "tokens"


def test_int8_of_attention_and_head_needs_no_data_and_stays_close(
    mixtral: Path, tmp_path: Path
) -> None:
    model = moexport.load(mixtral, config={"use_cache": False})
    out = moexport.export(
        model, tmp_path / "out", precision="int8", quantize="all", target="ort-cpu", verify=False
    )
    linears = out.manifest.numbers["linears"]
    assert len(linears) == 2 * 4 + 1 and set(linears.values()) == {None}
    ids = np.random.default_rng(0).integers(0, 61, (16, 8))
    logits = out.session().run(ids)["logits"]
    expected, _ = Library(MIXTRAL, mixtral)(input_ids=torch.from_numpy(ids), use_cache=False)

    def perplexity(scores: np.ndarray) -> float:
        rows = torch.from_numpy(scores[:, :-1]).flatten(0, 1)
        targets = torch.from_numpy(ids[:, 1:]).flatten()
        return float(torch.nn.functional.cross_entropy(rows, targets).exp())

    assert perplexity(logits) == pytest.approx(perplexity(expected), rel=0.02)


def test_shards_in_bfloat16_are_the_same_model(mixtral: Path, tmp_path: Path) -> None:
    class_ = transformers.MixtralForCausalLM
    network = class_.from_pretrained(mixtral, dtype=torch.bfloat16)
    network.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    model = moexport.load(tmp_path / "shards")
    expected = network.float()
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        y = model.original(*_tensors(model, ids))[0]  # type: ignore[misc]
        torch.testing.assert_close(y, expected(ids).logits, rtol=1e-4, atol=1e-4)


def test_weights_of_16_bits_are_mapped_from_a_file_of_float32(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floats, "IN_MEMORY_BYTES", 0)
    network = transformers.MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.bfloat16)
    network.save_pretrained(tmp_path / "half")
    model = moexport.load(tmp_path / "half")
    (place,) = set(model.source.mapped) - set(model.source.files)
    maps = Path("/proc/self/maps").read_text()
    assert str(place) in maps
    for name, weight in network.named_parameters():
        if "experts" not in name:
            assert torch.equal(model.module.get_parameter(name), weight.float())


def _tensors(model: Model, ids: torch.Tensor) -> list[torch.Tensor]:
    return [torch.from_numpy(x) for x in completed(ids.numpy(), model.inputs).values()]


ACTIVATIONS = {
    "silu": ("silu", 1.0),
    "gelu": ("gelu", 1.0),
    "gelu_pytorch_tanh": ("gelu-tanh", 1.0),
    "relu": ("relu", 1.0),
    "relu2": ("relu2", 1.0),
    "quick_gelu": ("silu", 1.702),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_recognised(name: str) -> None:
    module = experts_of("MixtralForCausalLM", "mixtral", hidden_act=name)
    layer = canonical("experts", module, 2)
    assert (layer.spec.activation, layer.spec.alpha) == ACTIVATIONS[name]
    check_layer(layer, module)


def test_an_activation_that_is_unknown_is_refused() -> None:
    module = experts_of("MixtralForCausalLM", "mixtral", hidden_act="tanh")
    with pytest.raises(FamilyError, match="layer experts: what MixtralExperts computes between"):
        canonical("experts", module, 2)


def experts_of(class_: str, type_: str, **config: object) -> torch.nn.Module:
    settings = {**ARCHITECTURES[type_].settings(second=False), **config}
    built = getattr(transformers, class_)(transformers.AutoConfig.for_model(type_, **settings))
    return next(iter(experts_modules(built.eval()).values()))


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_folder_that_cannot_be_served_is_refused_with_a_reason(
    mixtral: Path, tmp_path: Path
) -> None:
    llama = tmp_path / "llama"
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(llama)
    with pytest.raises(FamilyError, match="llama has no experts that use the experts int"):
        moexport.load(llama)
    unknown = copied(mixtral, tmp_path)
    change_config(unknown, model_type="unheard-of", auto_map={"AutoModel": "code.Model"})
    with pytest.raises(FamilyError, match=r"cannot read its config\.json") as caught:
        moexport.load(unknown)
    assert "never run" in str(caught.value.hint)


def test_weights_that_are_not_whole_are_refused(mixtral: Path, tmp_path: Path) -> None:
    folder = copied(mixtral, tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop("lm_head.weight")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"1 weights are missing, the first is lm_head\.weight"
    ):
        moexport.load(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="contains no weights"):
        moexport.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="contains no weights"):
        moexport.load(folder)


@pytest.mark.parametrize(
    ("k", "says"),
    [(9, "layer model.layers.0.mlp.experts has 8 experts"), ("input", 'k="input": the k of')],
)
def test_a_k_that_cannot_be_is_refused(
    k: int | str, says: str, mixtral: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        moexport.export(moexport.load(mixtral), tmp_path / "out", k=k)
    assert not (tmp_path / "out").exists()


def test_targets_of_engines_are_refused_for_several_inputs(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="engines are built from graphs with one input"):
        moexport.export(moexport.load(mixtral), tmp_path / "out", target="tensorrt", engine=False)


def test_what_takes_models_of_one_input_says_so(mixtral: Path) -> None:
    model, ids = moexport.load(mixtral), np.zeros((2, 4), np.int64)
    says = "needs a model with one input, but this mixtral model has 7"
    with pytest.raises(UsageError, match=says):
        moexport.calibrate(model, ids)
    with pytest.raises(UsageError, match="from this mixtral model, which does not classify"):
        moexport.specialise(model, {"input_ids": ids}, group_by=[0, 1])


def test_without_the_library_the_user_is_told_the_extra(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="models of this kind need transformers") as told:
        moexport.load(mixtral)
    assert "pip install '.[transformers]'" in str(told.value.hint)


def test_only_the_cache_can_be_said_of_a_configuration(mixtral: Path) -> None:
    with pytest.raises(UsageError, match=r'num_heads"\]: the settings of a transformers model'):
        moexport.load(mixtral, config={"num_heads": 4})


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("qwen3_moe", {"rope_type": "dynamic", "factor": 2.0}),
        (
            "phimoe",
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_a_rotary_embedding_that_branches_on_the_length_is_refused_by_name(
    name: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    parameters = {"rope_theta": 1e4, **rope}
    folder = save(ARCHITECTURES[name], tmp_path / "model", rope_parameters=parameters)
    with pytest.raises(FamilyError, match=f"rope_type '{rope['rope_type']}' is not supported"):
        moexport.load(folder)
