"""A document that is longer than its limit is refused in a sentence that names both."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from moexport.common.documents import MAX_BYTES
from moexport.exporter.checkpoints.weight_files import INDEX_BYTES
from moexport.plugins.jax.vmoe_files import INDEX_BYTES as VMOE_BYTES
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save
from moexport.tests.command import run
from moexport.tests.recorded import DATA

LAYER = DATA / "soft_moe_fkodom" / "weights.pt"
MODEL = (LAYER, "--set", "version=0.2.0")
JSON, YAML, TOML = (MAX_BYTES[kind] for kind in ("json", "yaml", "toml"))

Arguments = Sequence[str | Path]


def export(option: str, name: str) -> Callable[[Path], tuple[Path, Arguments]]:
    return lambda d: (d / name, ("export", LAYER, option, d / name, "-o", d / "out"))


def of_transformers(folder: Path) -> tuple[Path, Arguments]:
    place = save(ARCHITECTURES["mixtral"], folder / "m")
    return place / "config.json", ("inspect", place)


def beside_weights(folder: Path) -> tuple[Path, Arguments]:
    shutil.copy(LAYER, folder / "pytorch_model.bin")
    return folder / "config.json", ("inspect", folder)


CASES: dict[str, tuple[Callable[[Path], tuple[Path, Arguments]], int]] = {
    "a configuration in YAML": (export("--config", "c.yaml"), YAML),
    "a configuration in TOML": (export("--config", "c.toml"), TOML),
    "a configuration in JSON": (export("--config", "c.json"), JSON),
    "a configuration beside weights": (beside_weights, JSON),
    "a configuration of transformers": (of_transformers, JSON),
    "a recipe": (export("--recipe", "recipe.yaml"), YAML),
    "coefficients": (export("--rewrite", "edits.json"), JSON),
    "a table of ranges": (
        lambda d: (
            d / "table.json",
            (
                *("export", *MODEL, "-o", d / "out"),
                *("--precision", "int8", "--calibration", d / "table.json"),
            ),
        ),
        JSON,
    ),
    "results": (lambda d: (d / "r.json", ("report", d / "r.json", "-o", d / "page.html")), JSON),
    "a manifest": (lambda d: (d / "manifest.json", ("inspect", d)), JSON),
    "an index of a checkpoint": (
        lambda d: (d / "m.safetensors.index.json", ("inspect", d / "m.safetensors.index.json")),
        INDEX_BYTES,
    ),
    "an index of vmoe": (lambda d: (d / "m.index", ("inspect", d / "m.index")), VMOE_BYTES),
}


@pytest.mark.parametrize("case", CASES)
def test_a_document_over_its_limit_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    made, limit = CASES[case]
    path, arguments = made(tmp_path)
    with path.open("wb") as file:
        file.truncate(limit + 1)
    outcome = run(*arguments)
    assert outcome.code in (1, 2), outcome.err
    assert f"{path} has more than {limit} bytes, the limit for" in outcome.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["sizes.json", "shardindex.json", "_info.json"])
def test_an_index_of_data_over_its_limit_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(10240))
    with (tmp_path / name).open("wb") as file:
        file.truncate(JSON + 1)
    outcome = run("calibrate", *MODEL, "--data", tmp_path, "-o", tmp_path / "table.json")
    shutil.rmtree(tmp_path)
    assert outcome.code == 1
    assert f"{name} has more than {JSON} bytes" in outcome.error
