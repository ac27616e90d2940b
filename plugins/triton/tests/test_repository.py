"""Model repositories have the right files, and Triton's own protobuf reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from moexport.bench.engines import KINDS
from moexport.common.files import sha256
from moexport.common.onnx_runtime import ort
from moexport.errors import EngineError, OutputError, UsageError
from moexport.exporter.bundle.manifest import digest
from moexport.exporter.session import SessionOptions
from moexport.plugins.openvino.session import OpenVinoSession
from moexport.tests.command import run
from moexport.tests.exporter.tensorrt.engines import export, with_plan
from moexport.tests.recorded import read_case

Bundles = dict[str, moexport.Bundle]


def configuration(client: Any, model: Path) -> Any:
    """Returns a model's configuration, as Triton reads it."""
    text = (model / "config.pbtxt").read_text(encoding="utf-8")
    found = text_format.Parse(text, client.model_config_pb2.ModelConfig())
    assert found.name == model.name
    return found


def test_onnx_runtime_batches_inputs_of_a_graph_with_a_constant_k(
    client: Any, bundles: Bundles, tmp_path: Path
) -> None:
    (model,) = moexport.triton(
        bundles["2"], tmp_path / "models", name="vit", instances=2, threads=3
    )
    told = configuration(client, tmp_path / "models" / "vit")
    assert (told.backend, told.max_batch_size) == ("onnxruntime", 32)
    (x,) = told.input
    assert (x.name, list(x.dims), x.data_type) == (
        "input",
        [3, 32, 32],
        client.model_config_pb2.TYPE_FP32,
    )
    output, *chosen = told.output
    assert (output.name, list(output.dims)) == ("output", [10])
    assert [list(each.dims) for each in chosen] == [[2], [2]]
    assert told.HasField("dynamic_batching")
    assert told.parameters["intra_op_thread_count"].string_value == "3"
    (group,) = told.instance_group
    assert (group.count, group.kind) == (2, group.KIND_CPU)
    (sample,) = told.model_warmup
    file = tmp_path / "models" / "vit" / "warmup" / sample.inputs["input"].input_data_file
    stored = np.frombuffer(file.read_bytes(), np.float32)
    assert stored.size == np.prod(sample.inputs["input"].dims)
    graph = tmp_path / "models" / "vit" / "1" / "model.onnx" / "model.onnx"
    y = ort.InferenceSession(graph).run(["output"], {"input": read_case("soft_moe_vit").x})[0]
    assert np.array_equal(y, bundles["2"].session()(read_case("soft_moe_vit").x))
    assert model.name == "vit"


def test_k_has_a_default_in_onnx_runtime(client: Any, bundles: Bundles, tmp_path: Path) -> None:
    moexport.triton(bundles["input"], tmp_path / "models", name="any", k=3)
    told = configuration(client, tmp_path / "models" / "any")
    assert told.max_batch_size == 0 and not told.HasField("dynamic_batching")
    by_name = {each.name: each for each in told.input}
    assert by_name["k"].optional and list(by_name["k"].dims) == [1]
    assert list(by_name["input"].dims) == [-1, 3, 32, 32]
    file = tmp_path / "models" / "any" / "1" / "model.onnx" / "model.onnx"
    onnx.checker.check_model(file)
    session, x = ort.InferenceSession(file), read_case("soft_moe_vit").x
    assert [each.name for each in session.get_overridable_initializers()] == ["k"]
    own = bundles["input"].session()
    for k in (None, 5):
        feeds = {"input": x} | ({} if k is None else {"k": np.array([k])})
        assert np.array_equal(session.run(["output"], feeds)[0], own(x, k or 3))


def test_several_k_become_an_ensemble(client: Any, bundles: Bundles, tmp_path: Path) -> None:
    models = moexport.triton([bundles["2"], bundles["4"]], tmp_path / "models", name="vit")
    assert [each.name for each in models] == ["vit-k2", "vit-k4", "vit"]
    told = configuration(client, tmp_path / "models" / "vit")
    assert told.platform == "ensemble"
    assert [step.model_name for step in told.ensemble_scheduling.step] == ["vit-k2", "vit-k4"]
    names = {each.name for each in told.output}
    mapped = [dict(step.output_map) for step in told.ensemble_scheduling.step]
    assert {"output_k2", "output_k4"} <= names == {v for each in mapped for v in each.values()}
    assert (tmp_path / "models" / "vit" / "1").is_dir()


def test_a_version_is_added_to_existing_ones(bundles: Bundles, tmp_path: Path) -> None:
    models, config = tmp_path / "models", tmp_path / "models" / "vit" / "config.pbtxt"
    moexport.triton(bundles["2"], models, name="vit")
    config.write_text(config.read_text() + "version_policy { all { } }\n")
    with pytest.raises(OutputError, match="has a version 1") as caught:
        moexport.triton(bundles["2"], models, name="vit")
    assert "version=2" in str(caught.value.hint)
    moexport.triton(bundles["2"], models, name="vit", version=2)
    assert {each.name for each in config.parent.iterdir()} == {"1", "2", "warmup", "config.pbtxt"}
    assert config.read_text().endswith("version_policy { all { } }\n")
    with pytest.raises(OutputError, match="all versions share"):
        moexport.triton(bundles["4"], models, name="vit", version=3)
    config.write_bytes(b"\xff" + config.read_bytes())  # damaged
    with pytest.raises(OutputError, match="all versions share"):
        moexport.triton(bundles["2"], models, name="vit", version=3)
    assert not (models / "vit" / "3").exists()
    moexport.triton(bundles["4"], models, name="vit", version=3, force=True)
    assert {each.name for each in config.parent.iterdir()} == {"3", "warmup", "config.pbtxt"}
    assert [each.name for each in tmp_path.iterdir()] == ["models"]


def test_a_folder_that_is_no_repository_is_not_changed(bundles: Bundles, tmp_path: Path) -> None:
    (tmp_path / "models" / "vit").mkdir(parents=True)
    (tmp_path / "models" / "vit" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not a model of a Triton repository"):
        moexport.triton(bundles["2"], tmp_path / "models", name="vit")
    assert [each.name for each in tmp_path.rglob("*.*")] == ["mine.txt"]


@pytest.mark.parametrize(
    ("ks", "asked", "said"),
    [
        (["2"], {"k": 3}, "k=3: the k of"),
        (["input"], {"k": 9}, "k=9: the model has 8 experts"),
        (["2", "2"], {}, "has the same k as another of the bundles"),
        (["2", "input"], {}, "k is an input of its graph"),
        (["2"], {"name": "a/b"}, 'name="a/b"'),
        (["2"], {"name": "a" * 256}, "name has 256 characters, but a folder's name can have"),
        (["2"], {"backend": "pytorch"}, 'backend="pytorch": unknown value'),
        (["2"], {"instances": 0}, "instances=0: must be at least 1"),
        (["input"], {"delay_us": 5}, "delay_us=5: Triton does not batch"),
    ],
    ids=str,
)
def test_invalid_options_for_a_bundle_are_refused(
    ks: list[str], asked: dict[str, Any], said: str, bundles: Bundles, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        moexport.triton([bundles[k] for k in ks], tmp_path / "models", **asked)
    assert not (tmp_path / "models").exists()


def test_for_a_bundle_without_a_tensorrt_engine_the_hint_builds_one(
    bundles: Bundles, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="has no tensorrt engine") as caught:
        moexport.triton(bundles["2"], tmp_path / "models", backend="tensorrt")
    assert 'target="tensorrt"' in str(caught.value.hint)


@pytest.mark.path
def test_the_command_prints_what_it_wrote(bundles: Bundles, tmp_path: Path) -> None:
    done = run("triton", bundles["2"].path, "-o", tmp_path / "models", "--json")
    assert done.code == 0, done.err
    (told,) = json.loads(done.out)
    assert told["name"] == "weights" and told["files"][0] == "model.onnx/model.onnx"
    again = run("triton", bundles["2"].path, "-o", tmp_path / "models")
    assert again.code == 1
    assert "has a version 1" in again.error
    damaged = bundles["2"].path.with_name("damaged")
    damaged.mkdir()
    for each in bundles["2"].path.iterdir():
        (damaged / each.name).write_bytes(each.read_bytes())
    (damaged / "model.onnx").write_bytes(b"no graph")
    refused = run("triton", damaged, "-o", tmp_path / "models", "--name", "other")
    assert refused.code == 1
    assert "the content has changed" in refused.error
    assert not (tmp_path / "models" / "other").exists()


DAMAGE: dict[str, dict[str, Any]] = {
    "an unknown target": {"target": "mars"},
    "an invalid batch": {"batch": "x:y"},
    "inputs without axes": {"inputs": [{"name": "input", "dtype": "float32", "shape": []}]},
    "no inputs": {"inputs": []},
    "no layers": {"layers": []},
    "no graphs": {"graphs": []},
    "a type that Triton does not support": {
        "outputs": [{"name": "output", "dtype": "odd", "shape": ["batch"]}]
    },
    "an invalid k": {"k": []},
    "invalid engines": {"engines": [1, {"file": "../x"}]},
}


@pytest.mark.parametrize("what", [*DAMAGE, "model.onnx", "parity.npz", "weights.bin"])
@pytest.mark.parametrize("backend", ["onnxruntime", "python", "tensorrt"])
def test_a_damaged_bundle_is_refused_with_a_message_even_if_its_hashes_match(
    what: str, backend: str, bundles: Bundles, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(bundles["2"].path, tmp_path / "damaged"))
    manifest = json.loads((damaged / "manifest.json").read_text())
    if what in DAMAGE:
        manifest |= DAMAGE[what]
    else:
        (damaged / what).write_bytes(b"PK\3\4 damaged")
        manifest["files"][what] = {"sha256": sha256(damaged / what), "bytes": 12}
    (damaged / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    outcome = run("triton", damaged, "-o", tmp_path / "models", "--backend", backend)
    assert "defect" not in outcome.err and "Traceback" not in outcome.err
    assert (tmp_path / "models").exists() == (outcome.code == 0)
    if what != "weights.bin":  # which are only read when the graph runs
        assert outcome.code in (1, 2), outcome.out


def test_a_graph_in_tensorrts_integers_is_not_given_to_onnx_runtime(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=read_case("soft_moe_fkodom").x)
    options = ("--k", "2", "--precision", "int8", "--data", str(tmp_path / "x.npz"))
    bundle = export("soft_moe_fkodom", tmp_path, *options)
    refused = run("triton", bundle, "-o", tmp_path / "models")
    assert refused.code == 2
    assert "is quantized for tensorrt" in refused.error
    assert "--backend python" in refused.hint


SIZES = [[1, 3, 32, 32], [8, 3, 32, 32], [16, 3, 32, 32]]


def test_profiles_of_an_engine_are_the_limits_of_its_batches(client: Any, tmp_path: Path) -> None:
    bundle = export("soft_moe_vit", tmp_path, "--k", "2", target="tensorrt")
    profiles = [{"input": [SIZES[0]] * 3}, {"input": SIZES}]
    with_plan(bundle, profiles=profiles)
    (model,) = moexport.triton(bundle, tmp_path / "models", name="vit")
    assert any("a Triton with TensorRT 10.16.1" in note for note in model.notes)
    told = configuration(client, tmp_path / "models" / "vit")
    assert (told.backend, told.max_batch_size) == ("tensorrt", 16)
    (group,) = told.instance_group
    assert (group.kind, list(group.profile)) == (group.KIND_GPU, ["0", "1"])
    assert [list(each.dims) for each in told.output] == [[10], [-1], [-1]]
    assert (tmp_path / "models" / "vit" / "1" / "model.plan").is_file()
    refused = run("triton", bundle, "-o", tmp_path / "models", "--name", "b", "--threads", "2")
    assert refused.code == 2 and "--threads 2: an engine runs on the GPU" in refused.error


def test_k_of_an_engine_is_a_shape_tensor(client: Any, tmp_path: Path) -> None:
    bundle = export("soft_moe_vit", tmp_path, "--k", "input", target="tensorrt")
    with_plan(bundle, profiles=[{"input": SIZES, "k": [1, 2, 8]}])
    moexport.triton(bundle, tmp_path / "models", name="vit")
    told = configuration(client, tmp_path / "models" / "vit")
    assert told.max_batch_size == 0
    assert [(each.name, each.is_shape_tensor) for each in told.input] == [
        ("input", False),
        ("k", True),
    ]


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({"options": {"strip_plan": True}}, "strip_plan"),
        (
            {"bound": [{"name": "w", "file": "f", "offset": 0, "nbytes": 1, "shape": [1]}]},
            "bind_weights",
        ),
    ],
    ids=["stripped", "bound"],
)
def test_an_engine_without_its_weights_is_refused(
    more: dict[str, Any], option: str, tmp_path: Path
) -> None:
    bundle = export("soft_moe_vit", tmp_path, "--k", "2", target="tensorrt")
    with_plan(bundle, profiles=[{"input": SIZES}], **more)
    with pytest.raises(EngineError, match=f"built with {option}"):
        moexport.triton(bundle, tmp_path / "models")


@pytest.mark.skipif(
    KINDS["openvino"].missing() is not None, reason=str(KINDS["openvino"].missing())
)
def test_a_bundle_for_openvino_is_served_by_moexport_or_by_tritons_openvino(
    client: Any, tmp_path: Path
) -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", k=2, target="openvino", lowering="dense")
    (usual,) = moexport.triton(bundle, tmp_path / "models", name="usual")
    told = configuration(client, tmp_path / "models" / "usual")
    assert (told.backend, told.parameters["runtime"].string_value) == ("python", "openvino")
    (own,) = moexport.triton(bundle, tmp_path / "models", name="own", backend="openvino", threads=3)
    told = configuration(client, tmp_path / "models" / "own")
    assert (told.backend, told.default_model_filename) == ("openvino", "model.onnx")
    assert told.parameters["INFERENCE_NUM_THREADS"].string_value == "3"
    assert "including the choice of experts" in own.notes[0] and not usual.notes
    served = tmp_path / "models" / "own" / "1" / "model.onnx"
    y = OpenVinoSession(served, SessionOptions(runtime="openvino", threads=1))(case.x)
    np.testing.assert_allclose(y, bundle.session(threads=1)(case.x), atol=1e-6)
    every = moexport.export(model, tmp_path / "every", k="input", target="openvino", verify=False)
    with pytest.raises(UsageError, match="inputs without a batch axis"):
        moexport.triton(every, tmp_path / "models", name="k", backend="openvino")
