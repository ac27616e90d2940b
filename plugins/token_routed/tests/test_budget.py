"""A `config.json` with larger sizes than its weights is refused before anything is built."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from moexport.errors import CheckpointError, MoexportError
from moexport.exporter.checkpoints.load import load
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ARCHITECTURES["mixtral"], tmp_path_factory.mktemp("mixtral"))


def changed(folder: Path, tmp_path: Path, **values: Any) -> Path:
    """A folder with the same weights and other values in its `config.json`."""
    content = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | values))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_local_experts": 1_000_000}, "num_local_experts is 1000000"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers is 10000000"),
        ({"num_hidden_layers": 1e12}, "num_hidden_layers is 1"),
        ({"num_labels": 10**12}, "num_labels is"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is"),
        ({"num_hidden_layers": 1000}, "modules and parameters"),
        ({"num_local_experts": 900}, "parameters, but the weights have"),
        ({"hidden_size": 10**6, "intermediate_size": 10**6}, "parameters, but the weights have"),
        ({"vocab_size": 10**12}, "parameters, but the weights have"),
        ({"hidden_size": 2**62}, "cannot build a model"),
    ],
)
def test_counts_are_checked_against_the_headers_of_the_weights(
    values: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    started = time.process_time()
    with pytest.raises(MoexportError, match=said) as caught:
        load(changed(folder, tmp_path, **values))
    assert time.process_time() - started < 5
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "x"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"rope_parameters": []},
        {"rope_theta": "a"},
        {"hidden_act": "none"},
        {"architectures": 5},
        {"architectures": ["Trainer"]},
        {"architectures": ["AutoModel"]},
        {"architectures": [None]},
        {"model_type": "mixtral", "dtype": "float9"},
        {"layer_types": ["x"]},
        {"num_experts_per_tok": -1},
        {"num_experts_per_tok": 100},
        {"head_dim": 0},
        {"vocab_size": -1},
        {"vocab_size": 10**400},
        {"id2label": [1]},
        {"text_config": 3},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_an_odd_configuration_is_taken_or_refused_by_its_folder(
    values: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    place = changed(folder, tmp_path, **values)
    for with_values in (False, True):
        try:
            load(place, values=with_values)
        except MoexportError as error:
            assert str(tmp_path) in error.message


def test_a_configuration_that_is_a_list_or_too_deep_is_named(folder: Path, tmp_path: Path) -> None:
    place = changed(folder, tmp_path)
    deep = '{"model_type": "mixtral", "a": ' + "[" * 90 + "]" * 90 + "}"
    (place / "config.json").write_text(deep)
    with pytest.raises(CheckpointError, match="nested deeper"):
        load(place)
