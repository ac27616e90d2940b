"""Edits through the command line: done, recorded, shown, measured, and refused.

The expected result of an ablation comes from zeros in the checkpoint itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.errors import UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.model import Model
from moexport.tests.command import Outcome, run
from moexport.tests.commands.test_errors import assert_refused
from moexport.tests.graphs.mumoe_layers import mumoe_layers
from moexport.tests.recorded import DATA, ENTMAX, VIT_CONFIG, VIT_SETS, read_case

pytestmark = pytest.mark.plugins  # this plugin reads the edits

VIT = DATA / "soft_moe_vit" / "weights.pt"  # blocks.2.mlp and blocks.3.mlp, 8 experts each
TWO_LEVELS = DATA / "mumoe_tr_2level" / "weights.pt"  # 16 and 4 experts, 24 wide, 10 outputs


def assert_close(y: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(y - expected).max() <= 1e-4 * np.abs(expected).max()


def zeroed(checkpoint: Path, places: dict[str, Any], folder: Path) -> Path:
    """A copy of a checkpoint with zeros at the given places of its tensors."""
    state = torch.load(checkpoint, weights_only=True)
    for key, place in places.items():
        state[key] = state[key].clone()
        state[key][place] = 0
    torch.save(state, folder / "zeroed.pt")
    return folder / "zeroed.pt"


def in_pytorch(checkpoint: Path, x: np.ndarray, **config: Any) -> np.ndarray:
    with torch.no_grad():
        y: torch.Tensor = moexport.load(checkpoint, config=config).module(torch.from_numpy(x))
    return y.numpy()


def entry(**changes: Any) -> dict[str, Any]:
    """A valid entry of a rewrite file for `TWO_LEVELS`, with some changes."""
    means = [[1 / 16] * 16, [0.25] * 4]
    return {"layer": "layer", "output": 7, "coefficients": means, "lambda": -30.0} | changes


def rewriting(folder: Path, *entries: object) -> Path:
    path = folder / "rewrite.json"
    path.write_text(json.dumps(list(entries)), encoding="utf-8")
    return path


def test_an_ablated_export_is_that_of_a_checkpoint_with_zeros(tmp_path: Path) -> None:
    outcome = run(
        *("export", VIT, *VIT_SETS, "-o", tmp_path / "out", "--lowering"),
        *("dense,grouped", "--ablate", "blocks.2.mlp:3,5", "--ablate", "blocks.3.mlp:0"),
    )
    assert outcome.code == 0, outcome.err
    assert "edited: ablate blocks.2.mlp:3" in outcome.err
    experts = [("2", 3), ("2", 5), ("3", 0)]
    keys = [f"blocks.{b}.mlp.experts.{e}.fc2.{w}" for b, e in experts for w in ("weight", "bias")]
    other = zeroed(VIT, dict.fromkeys(keys, slice(None)), tmp_path)
    x = read_case("soft_moe_vit").x
    bundle = Bundle.open(tmp_path / "out")
    for graph in bundle.manifest.graphs:
        assert_close(bundle.session(graph.file)(x), in_pytorch(other, x, **VIT_CONFIG))
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity["untouched_cosine"] < 0.9999  # the model without edits
    assert bundle.manifest.edits == [
        {"edit": "ablate", "layer": f"blocks.{b}.mlp", "expert": e} for b, e in experts
    ]
    shown = run("inspect", tmp_path / "out").out
    assert "edited      ablate blocks.2.mlp:5\n" in shown
    model = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    (record,) = [p.value for p in model.metadata_props if p.key == "moexport"]
    assert json.loads(record)["edits"][0] == "ablate blocks.2.mlp:3"


@pytest.fixture(scope="module")
def mumoe_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Level 1 without expert 2 and level 2 without expert 0; output 7 rewritten; k an input."""
    folder = tmp_path_factory.mktemp("edited")
    outcome = run(
        *(
            "export",
            TWO_LEVELS,
            *ENTMAX,
            "-o",
            folder / "out",
            "--ablate",
            "layer:1.2,2.0",
            "--k",
            "input",
        ),
        *("--rewrite", rewriting(folder, entry())),
    )
    assert outcome.code == 0, outcome.err
    return folder / "out"


def test_a_hierarchy_is_edited_by_level(mumoe_bundle: Path, tmp_path: Path) -> None:
    places = {"MuMoE.factors.0": np.s_[:, 2], "MuMoE.factors.1": np.s_[:, 0]}
    other = zeroed(TWO_LEVELS, places, tmp_path)
    x = read_case("mumoe_tr_2level").x[:, None].astype(np.float32)
    expected = in_pytorch(other, x, act="entmax15")
    (layer,) = mumoe_layers(moexport.load(TWO_LEVELS, config={"act": "entmax15"}).module).values()
    first, second = (a.numpy().copy() for a in layer.coefficients(torch.from_numpy(x)))
    first[..., 2], second[..., 0] = 0, 0  # an ablated expert does not rewrite either
    expected[..., 7] += -30.0 * first.mean(-1) * second.mean(-1)
    assert_close(Bundle.open(mumoe_bundle).session()(x, 16), expected)


@pytest.mark.slow
def test_the_coefficient_of_an_ablated_expert_counts_as_zero_in_a_rewrite(tmp_path: Path) -> None:
    """As in docs/mumoe.md: if the subgroup has only that expert, no output is rewritten."""
    x = read_case("mumoe_tr_2level").x[:, None].astype(np.float32)
    (layer,) = mumoe_layers(moexport.load(TWO_LEVELS, config={"act": "entmax15"}).module).values()
    first = layer.coefficients(torch.from_numpy(x))[0].double().numpy().copy()
    ablated = int(first.max(axis=(0, 1)).argmax())
    assert first[..., ablated].max() > 0.1
    first[..., ablated] = 0
    places = {"MuMoE.factors.0": np.s_[:, ablated]}
    expected = in_pytorch(zeroed(TWO_LEVELS, places, tmp_path), x, act="entmax15")
    for name, of_ablated, of_others in (("alone", 50.0, 0.0), ("all", 50.0, 1.0)):
        mean = [of_ablated if expert == ablated else of_others for expert in range(16)]
        path = rewriting(tmp_path, entry(coefficients=[mean, [1.0] * 4]))
        edits = ("--ablate", f"layer:1.{ablated}", "--rewrite", path)
        outcome = run("export", TWO_LEVELS, *ENTMAX, "-o", tmp_path / name, *edits)
        assert outcome.code == 0, outcome.err
        wanted = expected.astype(np.float64)
        # The coefficients of the second level sum to 1.
        wanted[..., 7] += -30.0 * of_others * first.sum(-1)
        assert_close(Bundle.open(tmp_path / name).session()(x), wanted)


def test_every_edit_is_recorded_and_shown(mumoe_bundle: Path) -> None:
    manifest = json.loads((mumoe_bundle / "manifest.json").read_text())
    assert manifest["edits"] == [
        {"edit": "ablate", "layer": "layer", "expert": 2, "level": 1},
        {"edit": "ablate", "layer": "layer", "expert": 0, "level": 2},
        {"edit": "rewrite", **entry()},
    ]
    shown = run("inspect", mumoe_bundle).out
    assert "edited      ablate layer:2.0\n" in shown
    assert "edited      rewrite layer output 7 += -30·āᵀa\n" in shown
    assert run("verify", mumoe_bundle).code == 0


def test_without_edits_the_manifest_says_so(exported: Path) -> None:
    assert Bundle.open(exported).manifest.edits == []
    assert "edited" not in run("inspect", exported).out


@pytest.mark.slow
def test_a_benchmark_keeps_the_untouched_model_beside_the_edited(
    mumoe_bundle: Path, tmp_path: Path
) -> None:
    bundle = Bundle.open(mumoe_bundle)
    x = np.random.default_rng(0).standard_normal((8, 1, 24)).astype(np.float32)
    results = moexport.bench(bundle, data=x, k=["n", 2], engine="onnxruntime", round_s=0.001)
    untouched, *edited = results.rows
    assert untouched.engine == "pytorch-eager"
    assert untouched.parity is not None and untouched.parity.max_abs == 0
    assert [row.k for row in edited] == [16, 2]
    for row in edited:  # each agrees with the edited model
        assert row.error is None and row.parity is not None and row.parity.cosine > 0.999999
    y, trained = bundle.session()(x, 16), in_pytorch(TWO_LEVELS, x, act="entmax15")
    assert np.abs(y - trained).max() > 0.1 * np.abs(trained).max()


def test_python_takes_the_same_edits(mumoe_bundle: Path, tmp_path: Path) -> None:
    bundle = moexport.export(
        moexport.load(TWO_LEVELS, config={"act": "entmax15"}),
        tmp_path / "out",
        k="input",
        ablate=["layer:1.2", "layer:2.0"],
        rewrite=[entry()],
        verify=False,
    )
    assert bundle.manifest.edits == Bundle.open(mumoe_bundle).manifest.edits
    assert bundle.manifest.files["weights.bin"] == Bundle.open(mumoe_bundle).manifest.files[
        "weights.bin"
    ]  # fmt: skip


def refuse(folder: Path, *options: str | Path, weights: Path = TWO_LEVELS) -> Outcome:
    more = VIT_SETS if weights == VIT else ENTMAX
    outcome = run("export", weights, "-o", folder / "out", *more, *options)
    assert {path.name for path in folder.iterdir()} <= {"rewrite.json"}
    return outcome


@pytest.mark.parametrize(
    "text",
    ["", "3", "layer", "layer:", ":3", "layer:x", "layer:-1", "layer:1.2.3", "layer:1.", ","],
)
def test_an_ablation_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    outcome = refuse(tmp_path, f"--ablate={text}")
    assert_refused(outcome, f"--ablate {text}: '", "LAYER:LEVEL.EXPERT")
    assert "loading" not in outcome.err


@pytest.mark.parametrize(
    ("text", "message", "hint", "weights"),
    [
        ("blocks.1.mlp:0", "has no MoE layer blocks.1.mlp", "blocks.2.mlp, blocks.3.mlp", VIT),
        ("blocks.2.mlp:8", "layer blocks.2.mlp has 8 experts", "use 0 to 7", VIT),
        ("blocks.2.mlp:2.0", "has no level 2", "levels are counted from 1", VIT),
        ("blocks.2.mlp:0.0", "has no level 0", "levels are counted from 1", VIT),
        ("layer:3", "layer layer has 2 levels of experts", "layer:1.3 is expert 3", TWO_LEVELS),
        ("layer:2.4", "layer layer has 4 experts in level 2", "use 0 to 3", TWO_LEVELS),
        ("layer:3.0", "has no level 3", "1 has 16, 2 has 4", TWO_LEVELS),
    ],
)
def test_an_ablation_of_what_is_not_there(
    text: str, message: str, hint: str, weights: Path, tmp_path: Path
) -> None:
    outcome = refuse(tmp_path, "--ablate", text, weights=weights)
    assert_refused(outcome, message, hint)
    assert f"--ablate {text}" in outcome.error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "no output to rewrite is listed"),
        ("[]", "no output to rewrite is listed"),
        ("[1]", "entry 0 is a int, not an object"),
        ('[{"layer": "layer", "output": 1}]', "entry 0 lacks coefficients, lambda"),
        (json.dumps([entry(strength=2)]), "has the unknown key strength"),
        (json.dumps([entry(layer=0)]), "layer is 0, not a name"),
        (json.dumps([entry(output=-1)]), "output is -1, not an index"),
        (json.dumps([entry(output=True)]), "output is True, not an index"),
        (json.dumps([entry(output="7")]), "output is '7', not an index"),
        (json.dumps([entry(**{"lambda": None})]), "lambda is None, not a number"),
        (json.dumps([entry(**{"lambda": 1e39})]), "lambda is 1e+39, which float32 cannot"),
        (json.dumps([entry(coefficients="x")]), "coefficients are not lists of numbers"),
        (json.dumps([entry(coefficients=[[0.1], 3])]), "of level 2 are 3, not a list"),
        (json.dumps([entry(coefficients=[[float("nan")]])]), "of level 1, number 0 is nan"),
    ],
)
def test_a_rewrite_file_that_cannot_be_read(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rewrite.json").write_text(content)
    outcome = refuse(tmp_path, "--rewrite", tmp_path / "rewrite.json")
    assert outcome.code == 2
    assert message in outcome.error and "rewrite.json" in outcome.error
    assert outcome.hint
    assert "loading" not in outcome.err


def test_no_entries_to_rewrite_are_refused() -> None:
    """Empty edits are not a default, and are refused."""
    with pytest.raises(UsageError, match="rewrite: no output to rewrite is listed"):
        moexport.export(not_loaded, "out", rewrite=[])


def not_loaded() -> Model:
    raise AssertionError("what needs no model is refused before it is loaded")


def test_a_rewrite_file_that_is_not_there(tmp_path: Path) -> None:
    outcome = refuse(tmp_path, "--rewrite", tmp_path / "rewrite.json")
    assert_refused(outcome, "rewrite.json: cannot be read", "check --rewrite")


@pytest.mark.parametrize(
    ("changes", "message", "hint", "weights"),
    [
        ({"layer": "head"}, "the model has no MoE layer head", "its MoE layers: layer", TWO_LEVELS),
        ({"output": 10}, "layer layer: the layer has 10 outputs", "use 0 to 9", TWO_LEVELS),
        (
            {"coefficients": [0.5] * 16},
            "16 coefficients, but the layer has 16 and 4",
            "specialise",
            TWO_LEVELS,
        ),
        (
            {"coefficients": [[0.5] * 15, [0.5] * 4]},
            "15 and 4 coefficients, but the layer has 16 and 4 experts",
            "one list per level",
            TWO_LEVELS,
        ),
        ({"layer": "blocks.2.mlp"}, "a soft-moe layer has no coefficients", "--ablate works", VIT),
    ],
)
def test_a_rewrite_of_what_is_not_there(
    changes: dict[str, Any], message: str, hint: str, weights: Path, tmp_path: Path
) -> None:
    path = rewriting(tmp_path, entry(**changes))
    outcome = refuse(tmp_path, "--rewrite", path, weights=weights)
    assert_refused(outcome, message, hint)


def test_a_manifest_with_an_edit_that_is_none_is_refused(
    mumoe_bundle: Path, tmp_path: Path
) -> None:
    manifest = json.loads((mumoe_bundle / "manifest.json").read_text())
    manifest["edits"][1] = {"edit": "pruned", "where": "layer"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    outcome = run("inspect", tmp_path)
    assert outcome.code == 1
    assert "edit 1" in outcome.error
