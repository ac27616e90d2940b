"""`--expose-routing`: what every layer chooses is an output of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.parity import PARITY_FILE, Reference
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save
from moexport.tests.command import run
from moexport.tests.recorded import DATA, VIT_SETS, read_case

VIT = (DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS)


def exported(name: str, folder: Path, **options: Any) -> Bundle:
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config)
    return moexport.export(model, folder, data=case.x, expose_routing=True, **options)


def assert_chosen(bundle: Bundle, k: int | None = None) -> dict[str, np.ndarray]:
    """What a run gives beside the network's outputs is as declared, and what PyTorch chose."""
    expected = Reference.load(bundle.path / PARITY_FILE)
    values = bundle.session().run(expected.feeds(bundle.manifest.inputs[0].name), k)
    ports = {port.name: port for port in bundle.manifest.outputs}
    assert values.keys() == ports.keys()
    for choice, name in bundle.graph().selected.items():
        found, wanted = values[name], expected.selected[choice]
        shape, dtype = ports[name].shape, ports[name].dtype
        assert found.dtype == dtype and len(found.shape) == len(shape)
        sizes = {a: n for a, n in zip(shape, found.shape, strict=True) if isinstance(a, int)}
        assert all(size == fixed for fixed, size in sizes.items())
        if dtype == "int64":
            assert np.array_equal(np.sort(found, axis=-1), wanted)
        else:
            np.testing.assert_allclose(found, wanted, atol=1e-5)
    return values


@pytest.mark.parametrize("lowering", ["gather", "fused"])
def test_a_run_gives_the_experts_that_pytorch_chose(lowering: str, tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", k=3, lowering=lowering, target="ort-cpu")
    values = assert_chosen(bundle)
    names = [name for name in values if name.endswith("/selected")]
    assert len(names) == len(bundle.manifest.layers)
    assert [port.shape for port in bundle.manifest.outputs[1:]] == [("batch", 3)] * len(names)
    assert next(iter(values)) == "output"
    onnx.checker.check_model(bundle.graph_file(), full_check=True)


@pytest.mark.parametrize("name", ["mumoe_cp_2level", "mumoe_gpt2_cp"])
def test_a_mumoe_gives_the_coefficients_of_every_level(name: str, tmp_path: Path) -> None:
    bundle = exported(name, tmp_path / "out", k=2)
    values = assert_chosen(bundle)
    levels = sum(len(layer.levels) for layer in bundle.manifest.layers)
    assert len(values) == 1 + levels


@pytest.mark.slow
def test_token_routed_layers_give_the_experts_of_each_token_by_input(tmp_path: Path) -> None:
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", expose_routing=True)
    assert_chosen(bundle)
    ids = np.arange(10).reshape(2, 5)
    chosen = [y for name, y in bundle.session().run(ids).items() if name.endswith("/selected")]
    assert [y.shape for y in chosen] == [(2, 5, 2)] * 2
    assert all(check.passed for check in bundle.verify())


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["dense", "grouped"])
def test_every_lowering_of_token_routed_layers_gives_their_experts(
    lowering: str, tmp_path: Path
) -> None:
    model = moexport.load(save(ARCHITECTURES["mixtral"], tmp_path / "model"))
    out = tmp_path / "out"
    bundle = moexport.export(model, out, lowering=lowering, expose_routing=True)
    assert len(assert_chosen(bundle)) == len(model.outputs) + len(bundle.manifest.layers)


def test_one_graph_gives_as_many_experts_as_each_run_asks_for(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", k="input")
    assert bundle.manifest.outputs[1].shape == ("batch", "k")
    x = read_case("soft_moe_vit").x
    for k in (1, 4):
        _, chosen, _ = bundle.session().run(x, k).values()
        assert chosen.shape == (len(x), k)


def test_verify_compares_the_chosen_experts_below_fp32(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", k=2, precision="int8")
    (parity,) = (c for c in bundle.verify() if c.name == "parity of model.onnx")
    assert parity.passed and "same experts in" in parity.detail


def test_a_fixed_batch_is_the_first_axis_of_what_was_chosen(tmp_path: Path) -> None:
    bundle = exported("soft_moe_vit", tmp_path / "out", k=2, batch=2)
    assert bundle.manifest.outputs[1].shape == (2, 2)


def test_the_command_says_what_was_chosen_and_refuses_where_nothing_is(tmp_path: Path) -> None:
    place = ("-o", tmp_path / "out", "--expose-routing")
    refused = run("export", *VIT, *place)
    assert refused.code == 2
    assert "--expose-routing: every layer computes all of its experts" in refused.error
    assert not (tmp_path / "out").exists()
    assert run("export", *VIT, *place, "--k", "2").code == 0
    told = run("inspect", tmp_path / "out")
    assert "blocks.2.mlp/selected int64 (batch, 2)" in told.out
