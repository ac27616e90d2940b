"""INT8 of a benchmark never takes its ranges from the inputs that it scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.data import LabelledData, Streamed, open_labelled
from moexport.bench.ranges import ranges_of
from moexport.bench.request import BenchRequest
from moexport.calibration.table import CalibrationTable
from moexport.errors import CalibrationError
from moexport.exporter.model import Model
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import TABLE, VIT_CONFIG, VIT_SETS, read_case

WEIGHTS = read_case("soft_moe_vit").weights
COUNT, HELD = 40, 10
LOUD = 100.0


@pytest.fixture(scope="module")
def model() -> Model:
    return moexport.load(WEIGHTS, config=VIT_CONFIG)


@pytest.fixture(scope="module")
def data(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first quarter has one colour that is a hundred times as loud: its ranges tell."""
    x = np.random.default_rng(0).standard_normal((COUNT, 3, 32, 32), dtype=np.float32)
    x[:HELD, 0] *= LOUD
    with torch.no_grad():
        labels = model.module(torch.from_numpy(x)).numpy().argmax(axis=1)
    path = tmp_path_factory.mktemp("ranges") / "test.npz"
    np.savez(path, input=x, label=labels)
    return path


def measured(folder: Path, data: Path, *options: str | Path) -> Outcome:
    return run(
        *("bench", WEIGHTS, *VIT_SETS, "--data", data, "-o", folder, "--precision", "fp32,int8"),
        *("--k", "n", "--engine", "onnxruntime", "--no-memory", "--threads", "1", *options),
    )


def rows(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    results = json.loads((folder / "results.json").read_text())
    return results["protocol"], results["rows"]


def ranges(table: CalibrationTable) -> dict[str, Any]:
    return {name: vars_of(value) for name, value in table.ranges.items()}


def vars_of(value: Any) -> Any:
    return (value.low, value.high)


def test_a_part_of_the_data_gives_the_ranges_and_is_not_scored(
    model: Model, data: Path, tmp_path: Path
) -> None:
    outcome = measured(tmp_path, data)
    assert outcome.code == 0, outcome.err
    said = f"the first {HELD} inputs of the data, which are excluded from all measurements"
    assert said in outcome.out
    assert said in (tmp_path / "report.html").read_text()
    protocol, found = rows(tmp_path)
    assert protocol["ranges"]["held_out"] == HELD
    assert protocol["samples"] == COUNT - HELD
    assert {row["accuracy"]["n"] for row in found} == {COUNT - HELD}
    table = CalibrationTable.read(found_file(protocol))
    with np.load(data) as arrays:
        alone = moexport.calibrate(model, arrays["input"][:HELD])
        rest = moexport.calibrate(model, arrays["input"][HELD:])
    assert ranges(table) == ranges(alone)
    assert ranges(table) != ranges(rest)


def test_other_inputs_or_a_table_give_the_ranges_and_all_data_are_scored(
    model: Model, data: Path, tmp_path: Path
) -> None:
    with np.load(data) as arrays:
        others = arrays["input"][HELD:20] + 1
    np.savez(tmp_path / "train.npz", input=others)
    table = moexport.calibrate(model, others)
    table.write(tmp_path / "table.json")
    place = tmp_path / "feed"
    outcome = measured(place, data, "--calibrate-data", tmp_path / "train.npz")
    assert outcome.code == 0, outcome.err
    assert f"The INT8 ranges come from {tmp_path / 'train.npz'}." in outcome.out
    protocol, found = rows(place)
    assert protocol["ranges"]["held_out"] == 0
    assert {row["accuracy"]["n"] for row in found} == {COUNT}
    assert ranges(CalibrationTable.read(found_file(protocol))) == ranges(table)
    place = tmp_path / "table"
    outcome = measured(place, data, "--calibration", tmp_path / "table.json", "--quantize", "all")
    assert outcome.code == 0, outcome.err
    protocol, found = rows(place)
    assert protocol["ranges"]["table"] == str(tmp_path / "table.json")
    assert "# INT8 ranges from the table" in (place / "report.html").read_text()
    assert {row["accuracy"]["n"] for row in found if row["precision"] == "int8"} == {COUNT}


def test_inputs_that_are_measured_are_found_by_their_content_whatever_their_file_is_called(
    model: Model, data: Path, tmp_path: Path
) -> None:
    with np.load(data) as arrays:
        x = arrays["input"]
    np.savez(tmp_path / "copy.npz", input=x[::-1])
    np.savez(tmp_path / "part.npz", input=np.concatenate([x[:7] + 1, x[20:23]]))
    moexport.calibrate(model, x[:12]).write(tmp_path / "table.json")
    opened = open_labelled(str(data), model.input)
    said = {}
    for option, name in [
        ("calibrate_data", "copy.npz"),
        ("calibrate_data", "part.npz"),
        ("calibration", "table.json"),
    ]:
        given: dict[str, Any] = {option: tmp_path / name}
        request = BenchRequest(precision="int8", data=data, **given)
        said[name] = ranges_of(request, model, opened, exports=True).text
    assert said == {
        "copy.npz": f"{tmp_path / 'copy.npz'}, the inputs that are measured",
        "part.npz": f"{tmp_path / 'part.npz'}, which has 3 of the 40 inputs that are measured",
        "table.json": f"the table {tmp_path / 'table.json'}, "
        "made from the first 12 of the inputs that are measured",
    }


def test_the_page_of_a_bundle_in_int8_tells_what_calibrated_it(
    model: Model, data: Path, tmp_path: Path
) -> None:
    with np.load(data) as arrays:
        x, label = arrays["input"], arrays["label"]
    np.savez(tmp_path / "other.npz", input=x[HELD:] + 1, label=label[HELD:])
    moexport.export(model, tmp_path / "int8", k=2, precision="int8", data=data)
    table = f"the table in {tmp_path / 'int8'} (40 inputs)"
    for place, text in [
        (data, f"{table}, made from the inputs that are measured."),
        (tmp_path / "other.npz", f"{table}."),
    ]:
        outcome = run(
            *("bench", tmp_path / "int8", "--data", place, "-o", tmp_path / place.stem),
            *("--engine", "onnxruntime", "--no-memory", "--threads", "1"),
        )
        assert outcome.code == 0, outcome.err
        assert f"The INT8 ranges come from {text}" in outcome.out
        assert text in (tmp_path / place.stem / "report.md").read_text()


def test_the_row_s_own_command_writes_the_graph_that_was_measured(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert measured(Path("report"), data).code == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert re.search(r"--precision int8 .*--calibration report/calibration-\w+\.json", page)


def found_file(protocol: dict[str, Any]) -> Path:
    """The table that a benchmark wrote of the ranges that it found."""
    (file,) = protocol["ranges"]["found"].values()
    return Path(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--precision", "fp32", "--calibrate-data", __file__), "needs no ranges"),
        (("--precision", "fp32", "--calibration", TABLE), "needs no ranges"),
        (("--precision", "fp32", "--quantize", "all"), "belongs to --precision int8"),
        (
            ("--calibrate-data", __file__, "--calibration", TABLE),
            "the table already has the ranges",
        ),
    ],
)
def test_options_of_int8_that_cannot_apply_are_refused(
    options: tuple[str, ...], said: str, data: Path, tmp_path: Path
) -> None:
    outcome = measured(tmp_path / "out", data, *options)
    assert outcome.code == 2
    assert said in outcome.error


def test_a_table_of_another_model_is_an_error_and_no_row(data: Path, tmp_path: Path) -> None:
    other = read_case("soft_moe_mnist")
    moexport.calibrate(moexport.load(other.weights), other.x).write(tmp_path / "other.json")
    outcome = measured(tmp_path / "out", data, "--calibration", tmp_path / "other.json")
    assert outcome.code == 1
    assert "was made from another model" in outcome.error
    with pytest.raises(CalibrationError):
        moexport.bench(
            moexport.load(WEIGHTS, config=VIT_CONFIG),
            data=data,
            precision="int8",
            k="n",
            calibration=tmp_path / "other.json",
            engine="onnxruntime",
        )


def test_what_comes_after_some_samples_is_the_rest_of_them(data: Path, model: Model) -> None:
    streamed = open_labelled(str(data), model.input)
    assert isinstance(streamed, Streamed)
    with np.load(data) as arrays:
        held = LabelledData(arrays["input"], arrays["label"])
    for count in (1, HELD, COUNT - 1):
        rest = streamed.after(count).head(COUNT)
        assert rest.samples == streamed.after(count).samples == COUNT - count
        assert np.array_equal(rest.inputs, held.inputs[count:])
        assert rest.labels is not None
        assert held.labels is not None
        assert np.array_equal(rest.labels, held.labels[count:])
        assert np.array_equal(held.after(count).inputs, rest.inputs)
        assert held.after(count).after(1 if count < COUNT - 1 else 0).skipped >= count
