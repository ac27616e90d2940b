"""The table of ranges: what is written is read, what is not a table is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from moexport.calibration.table import CalibrationTable, Origin
from moexport.errors import CalibrationError
from moexport.graphs.precision.types import Range

RANGE = Range(low=-0.5, high=3.0, minimum=-0.75, maximum=9.0, count=1000)


def a_table() -> CalibrationTable:
    origin = Origin(
        model="ab", feed="cd", samples=10, k={"moe": 4}, method="percentile", percentile=99.99
    )
    return CalibrationTable(origin, {"moe/experts.input": RANGE}, {"linear": 12.5}, "0.1.0")


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    a_table().write(path)
    assert CalibrationTable.read(path) == a_table()
    assert json.loads(path.read_text())["schema"] == 1


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(CalibrationError, match=r"moe/experts\.hidden"):
        a_table().range("moe/experts.hidden")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "schema None"),
        ('{"schema": 9}', "schema 9"),
        ('{"schema": 1}', "not a complete calibration table"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(CalibrationError, match=says):
        CalibrationTable.read(path)


def test_a_range_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(a_table().to_json().replace("-0.5", "NaN"))
    with pytest.raises(CalibrationError, match=r"moe/experts\.input"):
        CalibrationTable.read(path)


def test_a_missing_file_says_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError) as caught:
        CalibrationTable.read(tmp_path / "none.json")
    assert "moexport calibrate" in str(caught.value.hint)


def test_affine_scales_reach_both_ends_and_hold_zero_exactly() -> None:
    s = RANGE.affine()
    numbers = np.round(np.array([-0.5, 0.0, 3.0]) / s.scale) + s.zero_point
    assert numbers.tolist() == [0, s.zero_point, 255]


def test_a_positive_range_is_widened_to_zero() -> None:
    s = Range(1.0, 2.0, 1.0, 2.0, 5).affine()
    assert s.zero_point == 0
    assert s.scale == pytest.approx(2 / 255)


def test_symmetric_scales_take_the_larger_side() -> None:
    assert RANGE.symmetric().scale == pytest.approx(3.0 / 127)
    assert RANGE.peak == 9.0
