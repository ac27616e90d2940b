"""Switch Transformers and NLLB-MoE, whose experts are separate modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moexport
import pytest
import torch
from moexport.errors import FamilyError, UsageError
from moexport.plugins.token_routed.own_modules import sparse_blocks
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, transformers
from moexport.plugins.token_routed.tests.architectures import save as save_usual
from moexport.plugins.token_routed.tests.encoder_decoders import (
    ENCODER_DECODERS,
    check_parts,
    reference,
    save,
)
from moexport.tests.command import run

SWITCH, NLLB = ENCODER_DECODERS["switch_transformers"], ENCODER_DECODERS["nllb-moe"]


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(SWITCH, tmp_path_factory.mktemp("switch") / "model")


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(NLLB, tmp_path_factory.mktemp("nllb") / "model")


@pytest.mark.slow
def test_a_switch_encoder_leaves_tokens_out_as_the_library_does(
    switch: Path, tmp_path: Path
) -> None:
    check_parts(SWITCH, switch, tmp_path, ("encoder",))


@pytest.mark.slow
def test_an_nllb_decoder_computes_step_by_step_what_its_router_chooses(
    nllb: Path, tmp_path: Path
) -> None:
    check_parts(NLLB, nllb, tmp_path, ("decoder",))


def test_tokens_beyond_the_capacity_of_a_switch_expert_weigh_nothing(switch: Path) -> None:
    model = moexport.load(switch)
    block = model.module.get_submodule("encoder.block.1.layer.1.mlp")
    index, weights = block.selected_experts(torch.randn(2, 20, 32), None)  # type: ignore[operator]
    kept = [
        torch.bincount(each[weight > 0], minlength=4)
        for each, weight in zip(index.reshape(2, 20), weights.reshape(2, 20), strict=True)
    ]
    assert all(counts.max() == 2 for counts in kept)
    assert (weights > 0).sum() < 40


def test_what_the_library_computes_otherwise_than_its_router_says_is_told(
    nllb: Path, switch: Path
) -> None:
    notes = moexport.load(nllb).notes
    with reference(NLLB, nllb) as model:
        blocks = sparse_blocks(model)
        x = torch.randn(1, 6, 32)
        ours = moexport.load(nllb)
        for path, block in blocks.items():
            torch.testing.assert_close(ours.module.get_submodule(path)(x), block(x))
        assert ours.notes == notes[:-1]
    assert "does not send tokens to the experts that its router chooses" in notes[-1]
    assert not any("does not send" in note for note in moexport.load(switch).notes)


def test_what_is_computed_when_a_bfloat16_checkpoint_is_loaded_is_float32(
    nllb: Path, tmp_path: Path
) -> None:
    network = transformers.NllbMoeForConditionalGeneration.from_pretrained(nllb)
    network.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    path = "model.decoder.embed_positions"
    expected, found = (
        moexport.load(folder).module.get_submodule(path).weights
        for folder in (nllb, tmp_path / "half")
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_part_that_cannot_be_is_refused(switch: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'"part": "head".*: it must be encoder or decoder'):
        moexport.load(switch, config={"part": "head"})
    mixtral = save_usual(ARCHITECTURES["mixtral"], tmp_path / "mixtral")
    with pytest.raises(UsageError, match="does not have an encoder and a decoder"):
        moexport.load(mixtral, config={"part": "encoder"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"second_expert_policy": "random"}, "selects the second expert at random"),
        ({"moe_eval_capacity_token_fraction": 0.5}, "room for 0.5 of the tokens of a batch"),
        (
            {"moe_eval_capacity_token_fraction": -1.0},
            r"room for expert_capacity tokens of a batch \(moe_eval_capacity_token_f.* -1\)",
        ),
    ],
)
def test_a_router_whose_choice_is_not_of_the_input_alone_is_refused(
    change: dict[str, Any], says: str, nllb: Path, tmp_path: Path
) -> None:
    folder = save(NLLB, tmp_path / "model", **change)
    with pytest.raises(FamilyError, match=says):
        moexport.load(folder)


def test_k_of_a_router_without_one_is_refused(switch: Path, tmp_path: Path) -> None:
    model = moexport.load(switch, config={"part": "encoder"})
    with pytest.raises(UsageError, match="has no k"):
        moexport.export(model, tmp_path / "out", k=2)


def test_inspect_tells_the_parts(switch: Path) -> None:
    told = run("inspect", switch, "--set", "part=decoder", "--json")
    assert told.code == 0, told.err
    report = json.loads(told.out)
    assert [layer["experts"] for layer in report["layers"]] == [4, 4]
    assert report["config"]["part"] == "decoder"
