"""Bundles of one model are measured in turn, against one PyTorch, in one table and one chart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.bench.report.page import payload
from moexport.bench.report.summary import line_name, sections
from moexport.bench.report.text import rows_table
from moexport.bench.results import Results, Row, read
from moexport.tests.command import run
from moexport.tests.recorded import DATA, VIT_SETS, read_case

VIT = (DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS)
QUICK = ("--no-memory", "--threads", "1", "--samples", "8", "--engine", "onnxruntime")


def exported(
    folder: Path, name: str, *words: str | Path, source: tuple[str | Path, ...] = VIT
) -> Path:
    done = run("export", *source, "-o", folder / name, "--no-verify", *words)
    assert done.code == 0, done.err
    return folder / name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels for the recorded inputs: the classes that the model itself gives, but for one."""
    case = read_case("soft_moe_vit")
    labels = case.y().argmax(axis=1)
    labels[0] = (labels[0] + 1) % case.y().shape[1]
    path = tmp_path_factory.mktemp("data") / "labelled.npz"
    np.savez(path, input=case.x, label=labels)
    return path


@pytest.fixture(scope="module")
def bundles(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four bundles: two that only their ranges tell apart, and one of another function."""
    folder = tmp_path_factory.mktemp("bundles")
    int8 = ("--k", "2", "--target", "ort-cpu", "--precision", "int8", "--data", data)
    return {
        "all": exported(folder, "all", "--target", "ort-cpu"),
        "widest": exported(folder, "widest", *int8, "--method", "minmax"),
        "least": exported(folder, "least", *int8, "--method", "mse"),
        "rescaled": exported(folder, "rescaled", "--k", "2", "--renormalize"),
    }


@pytest.fixture(scope="module")
def found(
    bundles: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    out = tmp_path_factory.mktemp("bench")
    done = run("bench", *bundles.values(), "--data", data, "-o", out, *QUICK)
    assert done.code == 0, done.err
    return read(out / "results.json")


def graphs(results: Results) -> dict[str | None, Row]:
    return {row.bundle: row for row in results.rows if row.engine == "onnxruntime"}


def test_all_bundles_of_a_model_are_one_table_against_one_run_of_pytorch(
    found: Results, bundles: dict[str, Path]
) -> None:
    assert [model.name for model in found.models] == ["weights"]
    (section,) = sections(found)
    assert [row.engine for row in found.rows if row.is_reference] == ["pytorch-eager"]
    assert graphs(found).keys() == bundles.keys()
    assert all(row.error is None for row in found.rows), [row.error for row in found.rows]
    assert {row.bundle for row in section.rows} == bundles.keys()
    listed = found.models[0].bundles
    assert {each.name: Path(each.path) for each in listed} == bundles
    # They took turns: rounds and calls of one group.
    (wait,) = {(w["model"], w["batch"]) for w in found.protocol["waited"]}
    assert wait == ("weights", 1)


def test_each_is_compared_with_its_own_function(found: Results) -> None:
    for name, row in graphs(found).items():
        assert row.parity is not None
        # Without its own reference the rescaled one is off by a tenth and more.
        assert row.parity.cosine > (0.9999 if name in ("all", "rescaled") else 0.99), name


def test_rows_that_nothing_else_tells_apart_are_called_by_their_bundle(found: Results) -> None:
    names = {bundle: line_name(row) for bundle, row in graphs(found).items()}
    assert names["widest"].endswith(", widest")
    assert names["least"].endswith(", least")
    assert names["rescaled"].endswith(", rescaled")
    assert "all" not in names["all"]
    assert len(set(names.values())) == 4
    table = rows_table(found)
    assert table.count("(untouched)") == 1
    assert all(names[bundle] in table for bundle in ("widest", "least"))


def test_bundles_of_several_models_are_on_one_page_and_in_any_order(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    state = torch.load(VIT[0], weights_only=True)
    torch.save({name: 0.9 * tensor for name, tensor in state.items()}, tmp_path / "second.pt")
    other = exported(tmp_path, "other", source=(tmp_path / "second.pt", *VIT_SETS))
    mixed = (bundles["all"], other, bundles["widest"])
    done = run("bench", *mixed, "-o", tmp_path / "out", *QUICK)
    assert done.code == 0, done.err
    results = read(tmp_path / "out" / "results.json")
    found = {model.name: [each.name for each in model.bundles] for model in results.models}
    assert found == {"weights": ["all", "widest"], "other": ["other"]}
    assert [row.model for row in results.rows if row.is_reference] == ["weights", "other"]
    assert all(row.error is None for row in results.rows)
    table = next(t for t in payload(results)["tables"] if t["id"] == "models")["tables"][0]
    ((heading, rows),) = table["groups"].items()
    assert heading == "batch 1"
    assert [row[0] for row in rows] == ["weights", "other"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--k", "4"), r"--k: k is a constant of the given bundles: .*widest \(k = 2\)"),
        (("--precision", "int8"), "--precision: the given bundles are measured"),
        (("--lowering", "dense"), "--lowering: the given bundles are measured"),
        (("--target", "ort-cpu"), "--target: the given bundles are measured"),
        # What a model would be measured with is refused as well: a bundle is not.
        (("--k", "n,0.5,0.25,0.125"), "--k: k is a constant of the given bundles"),
        (("--precision", "fp32"), "--precision: the given bundles are measured"),
        (("--lowering", "auto"), "--lowering: the given bundles are measured"),
        (("--target", "onnx"), "--target: the given bundles are measured"),
        (("--quantize", "experts"), "--quantize: the given bundles are measured"),
    ],
)
def test_what_a_bundle_cannot_take_is_refused(
    bundles: dict[str, Path], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    out = tmp_path / "out"
    done = run("bench", bundles["all"], bundles["widest"], "-o", out, *QUICK, *words)
    assert done.code == 2
    assert re.search(message, done.err), done.err
    assert "hint: leave" in done.err
    assert not out.exists()


def test_a_bundle_named_twice_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    done = run("bench", bundles["all"], bundles["all"], "-o", tmp_path / "out", *QUICK)
    assert done.code == 2
    assert "the bundle is named twice" in done.err


def test_the_page_has_the_folder_of_each_row(found: Results, bundles: dict[str, Path]) -> None:
    rows = payload(found)["results"]["rows"]
    assert {row["bundle"] for row in rows} == {*bundles, None}
