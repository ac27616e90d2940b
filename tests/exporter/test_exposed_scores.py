"""`--expose-routing=scores`: what layers choose by is an output of the graph, as in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.inputs import fitted_arrays
from moexport.exporter.model import Model
from moexport.graphs.layers.base import algorithm_1
from moexport.graphs.layers.mumoe import MuMoE
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save
from moexport.tests.command import run
from moexport.tests.graphs.score_formulas import all_coefficients, soft_moe_scores, tokens_of
from moexport.tests.recorded import DATA, VIT_SETS, read_case

VIT = (DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS)
HEAD = (DATA / "mumoe_cp_2level" / "weights.pt", "--set", "act=entmax15", "--set", "rest=default")


def exported(name: str, folder: Path, **options: Any) -> tuple[Model, np.ndarray, Bundle]:
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, folder, data=case.x, expose_routing="scores", **options)
    return model, case.x, bundle


def assert_soft_moe_scores(
    model: Model, x: np.ndarray, values: dict[str, np.ndarray], k: int, atol: float = 1e-5
) -> None:
    kept = dict.fromkeys(model.layers, k)
    with tokens_of(model) as seen, algorithm_1(model.module, kept), torch.no_grad():
        model.module(torch.from_numpy(x).double())
        wanted = {
            n: soft_moe_scores(layer, seen[n][0].numpy()) for n, layer in model.layers.items()
        }
    for name, scores in wanted.items():
        for what, expected in zip(("C", "D", "column_sums"), scores, strict=True):
            found = values[f"{name}/{what}"]
            assert found.dtype == np.float32 and found.shape == expected.shape
            np.testing.assert_allclose(found, expected, atol=atol * max(1, expected.max()))


@pytest.mark.parametrize("lowering", ["dense", "gather", "grouped", "conditional", "fused"])
def test_every_lowering_gives_c_and_d_of_all_experts_and_the_column_sums(
    lowering: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    model, x, bundle = exported("soft_moe_vit", out, k=3, lowering=lowering, target="ort-cpu")
    values = bundle.session().run(x)
    assert_soft_moe_scores(model, x, values, 3)
    for name in model.layers:
        best = np.argsort(-values[f"{name}/column_sums"], axis=1)[:, :3]
        chosen = values[f"{name}/selected"]
        assert np.array_equal(np.sort(chosen, axis=1), np.sort(best, axis=1))
    ports = {port.name: port.shape for port in bundle.manifest.outputs}
    assert list(values) == list(ports)
    assert ports["blocks.2.mlp/D"] == ("batch", 17, 8, 1)
    onnx.checker.check_model(bundle.graph_file(), full_check=True)


@pytest.mark.slow
def test_scores_are_there_where_all_experts_are_kept(tmp_path: Path) -> None:
    model, x, bundle = exported("soft_moe_vit_slots", tmp_path / "out")
    values = bundle.session().run(x)
    assert_soft_moe_scores(model, x, values, 4)
    assert not any(name.endswith("/selected") for name in values)
    assert all(check.passed for check in bundle.verify())


def test_one_graph_gives_the_same_scores_for_every_k(tmp_path: Path) -> None:
    model, x, bundle = exported("soft_moe_vit", tmp_path / "out", k="input", batch=2)
    assert_soft_moe_scores(model, x[:2], bundle.session().run(x[:2], 5), 5)
    first = "blocks.2.mlp/C"  # before which nothing depends on k
    one, all_of_them = (bundle.session().run(x[:2], k)[first] for k in (1, 8))
    np.testing.assert_array_equal(one, all_of_them)


@pytest.mark.parametrize(
    ("precision", "atol"), [("fp16", 2e-3), ("int8", 5e-2)], ids=["fp16", "int8"]
)
def test_scores_below_fp32_are_floats_of_the_router(
    precision: Any, atol: float, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"k": 4, "precision": precision, "target": "ort-cpu"}
    model, x, bundle = exported("soft_moe_vit", tmp_path / "out", **options)
    values = bundle.session().run(x)
    first = next(iter(model.layers))  # whose tokens no expert has rounded
    own = {name: model.layers[name] for name in [first]}
    with tokens_of(model) as seen, torch.no_grad():
        model.module(torch.from_numpy(x).double())
        expected = soft_moe_scores(own[first], seen[first][0].numpy())
    for what, wanted in zip(("C", "D", "column_sums"), expected, strict=True):
        scale = wanted.max()
        np.testing.assert_allclose(values[f"{first}/{what}"], wanted, atol=atol * scale)
    assert all(check.passed for check in bundle.verify())


@pytest.mark.plugins
def test_a_layer_that_is_given_its_slots_shows_the_c_of_the_network_around_it(
    tmp_path: Path,
) -> None:
    model = moexport.load("examples.own_layers:build", config={"layer": "masked"})
    bundle = moexport.export(model, tmp_path / "out", k=2, expose_routing="scores")
    (name,) = model.layers
    x = np.random.default_rng(0).standard_normal((3, 12, 6)).astype(np.float32)
    values = bundle.session().run(x)
    with tokens_of(model) as seen, torch.no_grad():
        model.module(torch.from_numpy(x).double())
    wanted = seen[name][0].numpy().reshape(3, 12, 4, 2)
    names = [f"{name}/{what}" for what in ("selected", "C", "column_sums")]
    assert list(values) == ["output", *names]
    np.testing.assert_allclose(values[f"{name}/C"], wanted, atol=1e-6)
    np.testing.assert_allclose(values[f"{name}/column_sums"], wanted.sum(axis=(1, 3)), atol=1e-5)


def test_a_mumoe_gives_all_coefficients_of_every_level(tmp_path: Path) -> None:
    model, x, bundle = exported("mumoe_cp_2level", tmp_path / "out", k=2)
    (name,) = model.layers
    layer = model.layers[name]
    assert isinstance(layer, MuMoE)
    values = bundle.session().run(x[:, None] if x.ndim == 2 else x)
    expected = all_coefficients(layer, x.reshape(-1, 1, x.shape[-1]))
    for level, (n, wanted) in enumerate(zip(layer.spec.levels, expected, strict=True)):
        place = "" if level == 0 else f"_{level + 1}"
        found = values[f"{name}/all_coefficients{place}"]
        np.testing.assert_allclose(found.reshape(wanted.shape), wanted, atol=2e-6)
        kept = values[f"{name}/coefficients{place}"]
        assert found.shape[-1] == n and ((kept > 0).sum(axis=-1) <= 2).all()
        assert np.array_equal(kept[kept > 0], found[kept > 0])


def test_a_mumoe_that_keeps_all_has_its_coefficients_once(tmp_path: Path) -> None:
    _, _, bundle = exported("mumoe_gpt2_cp", tmp_path / "out")
    names = [port.name.rpartition("/")[2] for port in bundle.manifest.outputs[1:]]
    assert names == ["coefficients"] * len(bundle.manifest.layers)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["dense", "grouped"])
def test_token_routed_layers_give_the_gates_of_the_chosen_experts(
    lowering: str, tmp_path: Path
) -> None:
    model = moexport.load(save(ARCHITECTURES["mixtral"], tmp_path / "model"))
    bundle = moexport.export(
        model, tmp_path / "out", expose_routing="scores", lowering=lowering, k=2
    )
    ids = np.arange(10).reshape(2, 5)
    values = bundle.session().run(ids)
    with tokens_of(model) as seen, torch.no_grad():
        whole = fitted_arrays(ids, model)
        model.module(*map(torch.from_numpy, whole.values()))
    for name, (_, index, weights) in seen.items():
        chosen, gates = values[f"{name}/selected"], values[f"{name}/gates"]
        assert chosen.shape == gates.shape == (2, 5, 2) and gates.dtype == np.float32
        dense = np.zeros((2, 5, model.layers[name].spec.experts))
        np.put_along_axis(dense, chosen, gates, axis=-1)
        wanted = np.zeros_like(dense).reshape(10, -1)
        np.put_along_axis(wanted, index.numpy(), weights.double().numpy(), axis=-1)
        np.testing.assert_allclose(dense.reshape(wanted.shape), wanted, atol=1e-5)
    assert all(check.passed for check in bundle.verify())


@pytest.mark.slow
def test_the_command_takes_the_option_alone_and_with_its_value(tmp_path: Path) -> None:
    for index, spelling in enumerate((["--expose-routing=scores"], ["--expose-routing", "scores"])):
        out = tmp_path / str(index)
        assert run("export", *VIT, *spelling, "--k", "2", "-o", out).code == 0
        assert "blocks.2.mlp/D float32 (batch, 17, 8, 1)" in run("inspect", out).out
    # Alone it takes no word that is another argument's.
    alone = run("export", "--expose-routing", *VIT, "--k", "2", "-o", tmp_path / "alone")
    assert alone.code == 0
    told = run("inspect", tmp_path / "alone").out
    assert "blocks.2.mlp/selected" in told and "blocks.2.mlp/D" not in told
    refused = run("export", *VIT, "--expose-routing=score", "-o", tmp_path / "none")
    assert (refused.code, refused.error) == (2, "--expose-routing=score: unknown value")
    assert "scores" in refused.hint and not (tmp_path / "none").exists()


def test_a_call_names_a_wrong_value_in_the_words_of_python(tmp_path: Path) -> None:
    with pytest.raises(moexport.errors.UsageError, match='expose_routing="score": unknown value'):
        moexport.export(
            moexport.load(VIT[0], config={"num_heads": 4, "rest": "default"}),
            tmp_path / "out",
            expose_routing="score",
        )


def test_a_run_writes_the_scores_that_were_asked_for(tmp_path: Path) -> None:
    x = read_case("soft_moe_vit").x
    np.savez(tmp_path / "x.npz", input=x)
    out = tmp_path / "out"
    assert run("export", *VIT, "--expose-routing=scores", "--k", "2", "-o", out).code == 0
    written = run("run", out, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert written.code == 0
    with np.load(tmp_path / "y.npz") as values:
        assert values["blocks.3.mlp/C"].shape == (len(x), 17, 8, 1)
        assert values["blocks.3.mlp/selected"].shape == (len(x), 2)
        np.testing.assert_allclose(values["blocks.3.mlp/C"].sum(axis=(2, 3)), 1, rtol=1e-5)
        np.testing.assert_allclose(values["blocks.3.mlp/D"].sum(axis=1), 1, rtol=1e-5)
    assert run("verify", out).code == 0


@pytest.mark.parametrize("k", ["n", "2"])
def test_a_run_writes_the_coefficients_of_a_hierarchy(k: str, tmp_path: Path) -> None:
    case = read_case("mumoe_cp_2level")
    x = case.x.reshape(len(case.x), 1, -1)
    np.savez(tmp_path / "x.npz", input=x)
    out = tmp_path / "out"
    assert run("export", *HEAD, "--expose-routing=scores", "--k", k, "-o", out).code == 0
    assert run("run", out, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz").code == 0
    model = moexport.load(case.weights, config=case.config)
    (layer,) = model.layers.values()
    assert isinstance(layer, MuMoE)
    every = "coefficients" if k == "n" else "all_coefficients"
    with np.load(tmp_path / "y.npz") as values:
        for place, wanted in zip(("", "_2"), all_coefficients(layer, x), strict=True):
            np.testing.assert_allclose(values[f"layer/{every}{place}"], wanted, atol=2e-6)


def test_merged_experts_have_no_scores(tmp_path: Path) -> None:
    """A muMoE layer whose experts are one matrix chooses nothing."""
    case = read_case("mumoe_cp")
    model = moexport.load(case.weights, config=case.config)
    (name,) = model.layers
    layer = model.layers[name]
    assert isinstance(layer, MuMoE)
    matrix = torch.zeros(layer.spec.dim + 1, layer.spec.out)
    merged = replace(model, module=layer.merged([matrix]))
    with pytest.raises(moexport.errors.UsageError, match="no routing to expose"):
        moexport.export(merged, tmp_path / "out", expose_routing="scores")
