"""Unfactorised and Tucker muMoE layers through the command line, against the whole tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.checkpoints.load import load
from moexport.graphs.layers.mumoe import Form, GateActivation, MuMoE, MuMoESpec
from moexport.tests.command import Outcome, run
from moexport.tests.graphs.lowerings.test_mumoe import spec_of
from moexport.tests.graphs.mumoe_layers import formula, random_layer, state_of
from moexport.tests.recorded import ENTMAX

RTOL = 1e-4  # of max|y|

SPECS = [
    spec_of("tucker", (8,)),
    spec_of("tucker", (8, 4), block=True, bias=False),
    spec_of("full", (8,)),
    spec_of("full", (6, 4), block=True),
    spec_of("full", (4, 3, 2), bias=False, norm="ln"),
]


def name_of(spec: MuMoESpec) -> str:
    return f"{spec.form}-{'x'.join(map(str, spec.levels))}"


def saved(layer: MuMoE, folder: Path) -> Path:
    torch.save(state_of(layer), folder / "layer.pt")
    return folder / "layer.pt"


def export(layer: MuMoE, folder: Path, *options: str) -> Outcome:
    return run("export", saved(layer, folder), *ENTMAX, "-o", folder / "out", *options)


def assert_computes_the_formula(layer: MuMoE, bundle: Bundle, k: int, given: int | None) -> None:
    session = bundle.session()
    for batch, tokens in ((1, 1), (5, 3)):
        x = np.random.default_rng(k).standard_normal((batch, tokens, layer.spec.dim))
        expected = formula(layer, x, k)
        y = session(x.astype(np.float32), given)
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_the_exported_layer_is_the_whole_tensor_contracted(spec: MuMoESpec, tmp_path: Path) -> None:
    layer = random_layer(spec)
    for k in ("n", "3", "input"):
        outcome = export(layer, tmp_path, "--k", k, "--force")
        assert outcome.code == 0, outcome.err
        bundle = Bundle.open(tmp_path / "out")
        assert bundle.manifest.source.family == "mumoe"
        if k == "input":
            for kept in (1, 3, spec.experts):
                assert_computes_the_formula(layer, bundle, kept, kept)
        else:
            assert_computes_the_formula(layer, bundle, spec.experts if k == "n" else 3, None)


@pytest.mark.parametrize("k", ["2", "input"])
def test_kept_experts_are_gathered_where_asked(k: str, tmp_path: Path) -> None:
    layer = random_layer(SPECS[3])
    outcome = export(layer, tmp_path, "--k", k, "--lowering", "gathered,unfactorised")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert_computes_the_formula(layer, bundle, 2, 2 if k == "input" else None)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert "Gather" in {node.op_type for node in graph.node}
    assert run("verify", tmp_path / "out").code == 0


def test_few_tokens_are_gathered_for_by_themselves(tmp_path: Path) -> None:
    layer = random_layer(spec_of("full", (64,)))
    checkpoint = saved(layer, tmp_path)
    chosen = {}
    for k in ("2", "n"):
        plan = run(
            "export", checkpoint, *ENTMAX, "-o", tmp_path / "out", "--dry-run", "--json", "--k", k
        )
        assert plan.code == 0, plan.err
        chosen[k] = json.loads(plan.out)["graphs"]["model.onnx"][0]["lowering"]
    assert set(chosen.values()) <= {"gathered", "unfactorised"}
    assert chosen["n"] == "unfactorised"


@pytest.mark.parametrize(
    ("form", "lowering"), [("tucker", "gathered"), ("full", "factorised"), ("cp", "unfactorised")]
)
def test_a_lowering_of_another_form_is_refused(form: Form, lowering: str, tmp_path: Path) -> None:
    outcome = export(random_layer(spec_of(form, (8,))), tmp_path, "--lowering", lowering)
    assert outcome.code == 1
    assert "factor" in outcome.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "name"), [("tucker", "TuckerMuMoE"), ("full", "FullMuMoE")])
def test_the_config_says_the_form_and_loads_the_same_layer_again(
    form: Form, name: str, tmp_path: Path
) -> None:
    layer = random_layer(spec_of(form, (8, 4), block=True))
    model = load(saved(layer, tmp_path), config={"act": "entmax15"})
    assert model.config["MuMoE_layer"] == name
    assert model.config["ranks"] == ([3, 4, 5, 6] if form == "tucker" else None)
    assert json.loads(json.dumps(model.config)) == model.config
    assert load(tmp_path / "layer.pt", config=model.config).config == model.config


def test_the_cost_of_an_unfactorised_layer_falls_with_k(tmp_path: Path) -> None:
    checkpoint = saved(random_layer(spec_of("full", (64,), bias=False)), tmp_path)
    costs = json.loads(run("inspect", checkpoint, *ENTMAX, "--json").out)["costs"]
    assert [cost["bytes_share"] for cost in costs] == [1, 1 / 2, 1 / 4, 1 / 8]


BROKEN: list[tuple[Form, dict[str, torch.Tensor | None], str]] = [
    ("full", {"MuMoE.weight": torch.ones(8, 4, 11)}, "need 4 axes"),
    ("full", {"MuMoE.weight": torch.ones(8, 3, 11, 12)}, r"for \[8, 3\] experts by level"),
    ("full", {"MuMoE.weight": torch.ones(8, 4, 13, 12)}, "inputs of width 13, expected 10, or 11"),
    ("full", {"MuMoE.weight": torch.ones(8, 4, 11, 0)}, "a size of zero"),
    ("full", {"MuMoE.factors.0": torch.ones(8, 4)}, "unexpected key: MuMoE.factors.0"),
    (
        "tucker",
        {"MuMoE.core": torch.ones(3, 4, 5, 7)},
        r"ranks of MuMoE.factors are \[3, 4, 5, 6\]",
    ),
    ("tucker", {"MuMoE.core": torch.ones(3, 4, 5)}, r"core has the shape \[3, 4, 5\]"),
    ("tucker", {"MuMoE.core": None}, "do not share one rank"),
    ("tucker", {"MuMoE.factors.3": None}, "has 3 factors, but 2 levels"),
    ("tucker", {"MuMoE.factors.1": torch.ones(4, 4, 1)}, "are not matrices"),
    (
        "tucker",
        {"MuMoE.core": torch.ones(0, 4, 5, 6), "MuMoE.factors.0": torch.ones(8, 0)},
        "a size or a rank of zero",
    ),
    ("tucker", {"bn.1.running_var": None}, "missing key: bn.1.running_var"),
    ("tucker", {"MuMoE2.weight": torch.ones(8, 4, 13, 10)}, "have different forms"),
]


@pytest.mark.parametrize(("form", "changes", "words"), BROKEN, ids=[b[2] for b in BROKEN])
def test_tensors_that_do_not_fit_are_refused(
    form: Form, changes: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    state = {**state_of(random_layer(spec_of(form, (8, 4)))), **changes}
    torch.save({k: t for k, t in state.items() if t is not None}, tmp_path / "layer.pt")
    outcome = run("export", tmp_path / "layer.pt", *ENTMAX, "-o", tmp_path / "out")
    assert outcome.code == 1
    assert "layer.pt" in outcome.error
    assert re.search(words, outcome.error), outcome.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("activation", get_args(GateActivation))
@pytest.mark.parametrize("form", ["cp", "full"])
def test_a_level_smaller_than_k_keeps_the_name_of_its_coefficients(
    form: Form, activation: GateActivation, tmp_path: Path
) -> None:
    layer = random_layer(spec_of(form, (5, 2), activation=activation))
    outcome = export(layer, tmp_path, "--k", "3", "--set", f"act={activation}")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert_computes_the_formula(layer, bundle, 3, None)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    made = {value for node in graph.node for value in node.output}
    assert set(bundle.manifest.graphs[0].selected.values()) <= made
