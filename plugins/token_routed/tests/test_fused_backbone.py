"""The backbone of a language model for ONNX Runtime: few ops, the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.common.onnx_runtime import ort
from moexport.exporter.bundle.bundle import Bundle
from moexport.plugins.token_routed.tests.architectures import (
    ARCHITECTURES,
    Library,
    check_steps,
    check_values,
    save,
)

CPU = "CPUExecutionProvider"


def ops_of(bundle: Bundle) -> Counter[str]:
    """The ops of a graph, and those in its branches."""

    def ops(graph: onnx.GraphProto) -> Iterator[str]:
        for node in graph.node:
            yield node.op_type
            for attribute in node.attribute:
                yield from ops(attribute.g)

    return Counter(ops(onnx.load(bundle.path / "model.onnx", load_external_data=False).graph))


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe", "gpt_oss"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries and keys from products, or normalised first, and attention with sinks."""
    place = tmp_path_factory.mktemp("fused")
    save(ARCHITECTURES[request.param], place / "model")
    moexport.export(moexport.load(place / "model"), place / "out", target="ort-cpu")
    return place


def test_attention_and_norms_are_one_op_each_with_the_values_of_the_library(exported: Path) -> None:
    bundle = Bundle.open(exported / "out")
    ops, sinks = ops_of(bundle), bundle.manifest.source.family == "gpt_oss"
    assert ops["GroupQueryAttention"] == 2, ops
    assert ops["Attention"] == (0 if sinks else 2), ops  # the op has no sinks
    assert ops["RotaryEmbedding"] == (0 if sinks else 4), ops
    of_sums = ops["SkipSimplifiedLayerNormalization"]
    assert of_sums == 4 and not ops["Reciprocal"], ops  # all norms but the first follow a sum
    assert ops["RMSNormalization"] + of_sums >= 5, ops
    assert bundle.manifest.opset == 23
    check_steps(bundle, Library(ARCHITECTURES[bundle.manifest.source.family], exported / "model"))


@pytest.mark.parametrize(("rows", "new"), [(1, 1), (2, 1), (1, 3)])
def test_a_token_is_appended_where_the_cache_is(rows: int, new: int, exported: Path) -> None:
    """In a buffer with room for more: the graph's input and output are the same memory."""
    session = ort.InferenceSession(exported / "out" / "model.onnx", providers=[CPU])
    bundle = Bundle.open(exported / "out")
    ids = np.arange(1, 1 + rows * (4 + new)).reshape(rows, -1)
    mask = np.ones_like(ids)
    mask[0, 1] = 0  # no padding of one side
    whole = bundle.session().run({"input_ids": ids, "attention_mask": mask})
    before = bundle.session().run({"input_ids": ids[:, :4], "attention_mask": mask[:, :4]})
    binding = session.io_binding()
    given = {"input_ids": ids[:, 4:], "attention_mask": mask}
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, 4:]
    for name, array in {**given, "position_ids": positions}.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    buffers = {}
    for name, array in before.items():
        if name != "logits":
            buffer = np.zeros((rows, array.shape[1], 64, array.shape[3]), np.float32)
            buffer[:, :, :4] = array
            buffers[name] = ort.OrtValue.ortvalue_from_numpy(buffer)
            binding.bind_ortvalue_input(name.replace("present", "past_key_values"), buffers[name])
            binding.bind_ortvalue_output(name, buffers[name])
    binding.bind_output("logits")
    session.run_with_iobinding(binding)
    check_values(binding.get_outputs()[-1].numpy(), whole["logits"][:, 4:])
    for name, buffer in buffers.items():
        check_values(buffer.numpy()[:, :, : 4 + new], whole[name])
        assert not buffer.numpy()[:, :, 4 + new :].any()


def test_an_opset_that_was_asked_for_is_the_graphs_opset(exported: Path, tmp_path: Path) -> None:
    model = moexport.load(exported / "model")
    bundle = moexport.export(model, tmp_path / "out", target="ort-cpu", opset=20)
    ops = ops_of(bundle)
    assert bundle.manifest.opset == 20
    assert not ops["Attention"] + ops["RotaryEmbedding"] + ops["RMSNormalization"], ops


def test_inputs_that_are_padded_on_the_left_are_not_attended_to(exported: Path) -> None:
    bundle = Bundle.open(exported / "out")
    name = bundle.manifest.source.family
    ids = np.arange(1, 13).reshape(2, 6)
    mask = np.ones_like(ids)
    mask[0, :2] = 0
    logits = bundle.session().run({"input_ids": ids, "attention_mask": mask})["logits"]
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    expected, _ = Library(ARCHITECTURES[name], exported / "model")(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy(positions),
    )
    check_values(logits[1], expected[1])
    check_values(logits[0, 2:], expected[0, 2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("olmoe", {"hidden_size": 56}), ("gpt_oss", {"head_dim": 14})]
)
def test_heads_that_the_op_in_place_does_not_take_have_another(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """With a width of 14; with sinks, no other op supports everything."""
    folder = save(ARCHITECTURES[name], tmp_path / "model", **sizes)
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", target="ort-cpu")
    ops = ops_of(bundle)
    assert not ops["GroupQueryAttention"], ops
    assert (ops["Attention"], ops["Softmax"] > 2) == ((2, False) if name == "olmoe" else (0, True))
    check_steps(bundle, Library(ARCHITECTURES[name], folder))


@pytest.mark.slow
def test_a_head_that_is_also_the_embedding_becomes_integers(tmp_path: Path) -> None:
    """The head is stored as the embedding, and the graph transposes it, like large heads."""
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model", tie_word_embeddings=True)
    model = moexport.load(folder, config={"use_cache": False})
    ids = np.arange(24).reshape(2, 12)
    expected, _ = Library(ARCHITECTURES["mixtral"], folder)(input_ids=torch.from_numpy(ids))
    bundle = moexport.export(
        model, tmp_path / "out", precision="int8", quantize="all", target="ort-cpu", verify=False
    )
    linears = bundle.manifest.numbers["linears"]
    assert len(linears) == 2 * 4 + 1 and set(linears.values()) == {None}
    graph = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph
    around = Counter(n.op_type for n in graph.node if "experts" not in n.name)
    assert not around["MatMul"] and around["Gemm"] == 2, around  # the routers alone
    assert around["MatMulIntegerToFloat"] == 2 * 2 + 1, around  # queries, keys and values in one
    away = np.linalg.norm(bundle.session().run(ids)["logits"] - expected, axis=-1)
    assert np.median(away / np.linalg.norm(expected, axis=-1)) <= 0.05  # a token may choose others


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_language_model_for_cuda_has_no_branches_and_the_same_values(
    precision: str, tmp_path: Path
) -> None:
    """Also at many tokens, for which an angle in FP16 is too coarse."""
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    options: dict[str, Any] = {"target": "ort-cuda", "precision": precision}
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", **options)
    parity = bundle.manifest.parity
    assert parity is not None and parity["passed"] and max(parity["token_counts"]) > 200
    ops = ops_of(bundle)
    assert not ops["If"] + ops["GroupQueryAttention"] + ops["Reciprocal"], ops
    assert (ops["Attention"], ops["RotaryEmbedding"]) == (2, 4), ops
    assert ops["SkipSimplifiedLayerNormalization"] == 4 and ops["RMSNormalization"] == 1, ops
    assert bundle.manifest.opset == 23
