"""Files that hang or fill the usual readers of YAML, TOML and JSON are refused in a sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from moexport.common.documents import MAX_BYTES
from moexport.errors import UsageError
from moexport.exporter.checkpoints.settings import parse_value, read_config
from moexport.plugins.tune.recipe import read_recipe

MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], y{i}: 1}}\n" for i in range(1, 20)
)
ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)

TUPLES = "a0: &a0 !!python/tuple [x, x]\n" + "".join(
    f"a{i}: &a{i} !!python/tuple [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)

PRINTED = """\
axes: &id001 !!python/tuple
- Moe/Mlp/.*
- !!python/tuple
  - expert
model:
  patch_size: !!python/tuple
  - 8
  - 8
resources:
- *id001
"""
"""As a ConfigDict of ml_collections prints its tuples."""

HOSTILE = [
    pytest.param("yaml", TUPLES, "aliases .* repeat more than", id="aliases of tuples"),
    pytest.param("yaml", "a: &a !!python/tuple [*a]", "anchors and aliases", id="of itself"),
    pytest.param("yaml", "a: !!python/object:os.x {}", "tags", id="an object"),
    pytest.param("yaml", "a: !!python/tuple {b: 1}", "tags", id="a mapping as a tuple"),
    pytest.param("yaml", MERGES, "anchors and aliases", id="nested merges"),
    pytest.param("yaml", ALIASES, "anchors and aliases", id="aliases"),
    pytest.param("yaml", "a: {<<: {b: 1}}", "merges", id="a merge"),
    pytest.param("yaml", "[" * 5000, "nested deeper", id="deep YAML"),
    pytest.param("yaml", 'a: !!int ""', "tags", id="an empty number"),
    pytest.param("yaml", f"a: {':'.join(['59'] * 100_000)}", "digits", id="base 60"),
    pytest.param("yaml", f"a: {':'.join(['59'] * 300)}.5", "YAML", id="float of base 60"),
    pytest.param("yaml", f"a: {'9' * 400}", "64 bits", id="a huge number"),
    pytest.param("yaml", "a: 2030-02-31", "YAML", id="a day that is none"),
    pytest.param("toml", ".".join("a" * 20_000) + " = 1", "parts", id="a dotted key"),
    pytest.param(
        "toml", "\n".join(f"a{i}.{'b.' * 300}c = 1" for i in range(60)), "parts", id="keys"
    ),
    pytest.param("toml", f"[{' . '.join(['a'] * 9000)}]", "parts", id="a dotted table"),
    pytest.param("toml", "a = " + "[" * 5000 + "]" * 5000, "TOML", id="deep TOML"),
    pytest.param("json", '{"a":' * 500 + "1" + "}" * 500, "nested deeper", id="deep JSON"),
    pytest.param("json", f'{{"a": {"9" * 400}}}', "64 bits", id="a huge number of JSON"),
    pytest.param("json", f'{{"a": {"9" * 5000}}}', "JSON", id="a number that Python refuses"),
]


@pytest.mark.parametrize(("kind", "text", "said"), HOSTILE)
def test_a_hostile_configuration_is_refused_at_once_by_its_name(
    kind: str, text: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / f"c.{kind}"
    file.write_text(text)
    started = time.process_time()
    with pytest.raises(UsageError, match=said) as caught:
        read_config(file)
    assert time.process_time() - started < 2
    assert str(file) in caught.value.message and "\n" not in caught.value.message
    if kind == "yaml":
        with pytest.raises(UsageError, match=said) as caught:
            read_recipe(file)
        assert f"--recipe {file}: " in caught.value.message


def test_a_configuration_is_read_as_ml_collections_prints_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(PRINTED)
    axes = ["Moe/Mlp/.*", ["expert"]]
    expected = {"axes": axes, "model": {"patch_size": [8, 8]}, "resources": [axes]}
    assert read_config(tmp_path / "c.yaml") == expected


@pytest.mark.parametrize("kind", sorted(MAX_BYTES))
def test_a_file_above_its_limit_is_refused_unread(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"c.{kind}"
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # a hole: a terabyte that takes no room
    with pytest.raises(UsageError, match=f"more than {MAX_BYTES[kind]} bytes"):
        read_config(file)


def test_a_value_on_the_command_line_is_as_strict_and_stays_text() -> None:
    for text in ("{<<: {a: 1}}", "[&a x]", '!!int ""', "[" * 5000):
        assert parse_value(text) == text
    assert parse_value("{a: [1, 0.5]}") == {"a": [1, 0.5]}
