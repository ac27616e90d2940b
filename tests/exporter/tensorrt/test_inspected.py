"""The precision that is read back from an engine: its network, and then its own layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from moexport.errors import EngineError
from moexport.exporter.bundle.manifest import LayerRecord, Manifest
from moexport.exporter.tensorrt.engines import check_precision, kernel_types, precision_notes
from moexport.exporter.tensorrt.worker import Compiled, Product, parse_report
from moexport.tests.exporter.tensorrt.engines import export

LAYER = "soft_moe_fkodom"


def engine_layer(nodes: list[str], words: str, **more: Any) -> dict[str, Any]:
    """A layer as the inspector's JSON has it ("Engine Inspector", TensorRT 10.16.1)."""
    return layer_of(nodes, {"Format/Datatype": words}, **more)


def layer_of(nodes: list[str], types: dict[str, str], **more: Any) -> dict[str, Any]:
    port = {"Name": "x", "Location": "Device", "Dimensions": [1, 8], **types}
    metadata = "\x1e".join(f"[ONNX Layer: {name}]" for name in nodes)
    return {"Name": "gemm", "LayerType": "gemm", "Inputs": [port], "Outputs": [port]} | {
        "Metadata": metadata,
        **more,
    }


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest.read(export(LAYER, tmp_path_factory.mktemp("layer"), "--k", "2"))


def products(layer: LayerRecord) -> list[Product]:
    return [
        Product(name=f"{layer.name}/experts/{what}", kind="matrix_multiply", precision="fp32")
        for what in ("products_unbiased", "outputs_unbiased")
    ]


def built(layers: list[Product], inspector: dict[str, Any] | None = None) -> Compiled:
    return Compiled(version="1.7", settings={}, layers=layers, inspector=inspector)


def check(manifest: Manifest, made: Compiled) -> dict[str, list[str]]:
    return check_precision(manifest, "model.onnx", made)


def test_experts_without_a_product_in_the_network_are_a_failure(manifest: Manifest) -> None:
    others = [Product(name="head/MatMul", kind="matrix_multiply", precision="fp32")]
    with pytest.raises(EngineError, match="built in no product"):
        check(manifest, built(others))


def test_an_inspector_that_writes_no_json_does_not_undo_the_build(manifest: Manifest) -> None:
    assert parse_report('{"Layers": []}') == {"Layers": []}
    for text in ("", '{"Layers": [', "[]"):
        kernels = check(manifest, built(products(manifest.layers[0]), parse_report(text)))
        assert kernels == {manifest.layers[0].name: []}
        assert "only the network's types prove" in precision_notes("e.plan", kernels)[0]


def test_a_product_in_another_type_is_a_failure(manifest: Manifest) -> None:
    layers = products(manifest.layers[0])
    layers[1] = replace(layers[1], precision="fp16")
    with pytest.raises(EngineError, match="requested in fp32, but built in fp16, fp32"):
        check(manifest, built(layers))


@pytest.mark.parametrize(
    "inspector",
    [
        {"Layers": [engine_layer(["head/MatMul"], "Row major linear FP32")]},
        {"Layers": ["__mye1", "__mye2"]},
    ],
)
def test_an_engine_that_does_not_name_the_experts_is_told_in_a_note(
    inspector: dict[str, Any], manifest: Manifest
) -> None:
    layer = manifest.layers[0]
    kernels = check(manifest, built(products(layer), inspector))
    assert kernels == {layer.name: []}
    (note,) = precision_notes("e.plan", kernels)
    assert layer.name in note and "the network's types" in note
    assert precision_notes("e.plan", {layer.name: ["fp32"]}) == []


def test_the_engines_own_types_are_kept_and_compared(manifest: Manifest) -> None:
    layer = manifest.layers[0]
    layers, names = products(layer), [each.name for each in products(layer)]
    good = {"Layers": [engine_layer(names, "Row major linear FP32")], "Bindings": ["input"]}
    assert check(manifest, built(layers, good)) == {layer.name: ["fp32"]}
    bad = {"Layers": [engine_layer(names, "Row major linear FP16 format")]}
    with pytest.raises(EngineError, match="the engine computes them in fp16"):
        check(manifest, built(layers, bad))


def test_a_kernel_that_fused_a_cast_does_not_undo_the_build(manifest: Manifest) -> None:
    """It reads and writes floats around products in 16 bits: that is no other precision."""
    layer = replace(manifest.layers[0], precision="fp16")
    layers = [replace(each, precision="fp16") for each in products(layer)]
    nodes = [*(each.name for each in layers), f"{layer.name}/experts/narrow"]
    inspector = {"Layers": [engine_layer(nodes, "Row major linear FP32")]}
    kernels = check(replace(manifest, layers=[layer]), built(layers, inspector))
    assert kernels == {layer.name: []}
    assert "the network's types" in precision_notes("e.plan", kernels)[0]


def test_without_a_gpu_there_is_nothing_to_compare(manifest: Manifest) -> None:
    assert check(manifest, built(products(manifest.layers[0]))) == {}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Row major linear FP32", "fp32"),
        ("Float", "fp32"),
        ("Half", "fp16"),
        ("Two wide channel vectorized row major FP16 format", "fp16"),
        ("BFloat16", "bf16"),
        ("Thirty-two wide channel vectorized row major Int8 format.", "int8"),
        ("FP8", "fp8"),
    ],
)
def test_the_words_of_several_versions_are_known(words: str, name: str) -> None:
    assert kernel_types({"Layers": [engine_layer(["a"], words)]}, ["a"]) == {name}


@pytest.mark.parametrize(
    ("datatype", "name"),
    [
        ("Float", "fp32"),
        ("Half", "fp16"),
        ("BFloat16", "bf16"),
        ("Int8", "int8"),
        ("FP8", "fp8"),
        ("Float8E4M3FN", "fp8"),
        ("Int4", "int4"),
    ],
)
@pytest.mark.parametrize("key", ["Datatype", "DataType"])
def test_the_layout_of_tensorrt_11_is_read(datatype: str, name: str, key: str) -> None:
    """NVIDIA's "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x"."""
    types = {"Format": "Row major linear format (kLINEAR)", key: datatype}
    assert kernel_types({"Layers": [layer_of(["a"], types)]}, ["a"]) == {name}


@pytest.mark.parametrize("types", [{"Format/Datatype": "Half"}, {"Datatype": "Half"}])
@pytest.mark.parametrize("precision", ["int8", "fp8", "int4"])
def test_kernels_of_quantised_experts_may_read_floats(
    precision: str, types: dict[str, str], manifest: Manifest
) -> None:
    layer = replace(manifest.layers[0], precision=precision)
    quantised = [replace(each, precision=precision) for each in products(layer)]
    inspector = {"Layers": [layer_of([each.name for each in quantised], types)]}
    kernels = check(replace(manifest, layers=[layer]), built(quantised, inspector))
    assert kernels == {layer.name: ["fp16"]}
    with pytest.raises(EngineError, match="built in fp32"):
        check(replace(manifest, layers=[layer]), built(products(layer), inspector))


def test_int8_products_may_lie_beside_floats_of_a_factorised_layer(manifest: Manifest) -> None:
    layer = replace(manifest.layers[0], precision="int8")
    mixed = [
        Product(name=f"{layer.name}/tensor.0/{what}", kind="matrix_multiply", precision=p)
        for what, p in (("input", "int8"), ("mixed", "fp16"))
    ]
    assert check(replace(manifest, layers=[layer]), built(mixed)) == {}
    with pytest.raises(EngineError, match="built in fp16"):
        check(replace(manifest, layers=[layer]), built(mixed[1:]))
