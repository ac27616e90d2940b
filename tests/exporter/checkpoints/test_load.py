"""Configuration from files and from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from moexport.errors import UsageError
from moexport.exporter.checkpoints.settings import read_config


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"num_heads": 12, "moe_layer_index": [1, 3]}'),
        ("c.yaml", "num_heads: 12\nmoe_layer_index: [1, 3]\n"),
        ("c.yml", "num_heads: 12\nmoe_layer_index:\n- 1\n- 3\n"),
        ("c.toml", "num_heads = 12\nmoe_layer_index = [1, 3]\n"),
    ],
)
def test_json_yaml_and_toml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_config(tmp_path / name) == {"num_heads": 12, "moe_layer_index": [1, 3]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("4.0", 4.0),
        ("1e-5", 1e-5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("avg", "avg"),
        ("", ""),
        ('""', ""),
        ("0.2.0", "0.2.0"),
        ("1,3", [1, 3]),
        ("[1, 3]", [1, 3]),
        ("224,", [224]),
        ("a,b", ["a", "b"]),
        ("blocks.3.mlp", "blocks.3.mlp"),
        ("a=b", "a=b"),
    ],
)
def test_values_mean_what_they_look_like(text: str, value: Any) -> None:
    found = read_config(sets=[f"key={text}"])["key"]
    assert found == value
    assert type(found) is type(value)


def test_pairs_overrule_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": 1, "b": 2}')
    assert read_config(tmp_path / "c.json", ["b=3", "c=4"]) == {"a": 1, "b": 3, "c": 4}


@pytest.mark.parametrize("pair", ["num_heads", "=12", ""])
def test_a_pair_without_key_or_value_is_refused(pair: str) -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        read_config(sets=[pair])


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.json", "{"), ("c.yaml", "a: ["), ("c.toml", "a ="), ("c.ini", ""), ("c.json", "[1]")],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        read_config(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none"):
        read_config(tmp_path / "none.json")
