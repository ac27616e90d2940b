"""The script that measures a card runs in small on the CPU, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from moexport.perf import gpu_rows
from moexport.perf.gpu_rows import TINY, Check, Item, Measured, results_table, run

ROW = Measured("ViT", "moexport, dense", "fp16", 1, 8)
TIMED: dict[str, Any] = {
    "gpu_ms": 0.5,
    "gpu_spread_ms": 0.01,
    "host_ms": 0.75,
    "limit_ms": 0.25,
    "off": 1e-4,
}


def plans(*rows: tuple[Measured, object]) -> object:
    """Rows that give what stands beside them, in place of the script's own."""

    def items(check: Check, rates: object) -> Iterator[tuple[Item, float]]:
        for row, found in rows:
            yield (row, lambda found=found: give(found)), 1.0  # type: ignore[misc]

    return items


def give(found: object) -> object:
    if isinstance(found, BaseException):
        raise found
    return found


def test_what_is_measured_is_kept_after_each_row_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    other = replace(ROW, batch=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gpu_rows, "items", plans((ROW, TIMED), (other, KeyboardInterrupt())))
        run(output, TINY, "cpu", 1.0)
    content = json.loads(output.read_text())
    assert content["complete"] is False
    assert content["rates"].keys() == {"stream_gb_s", "matmul_gflop_s", "fp16_gflop_s"}
    assert content["environment"]["packages"]["torch"]
    assert [row["over_limit"] for row in content["rows"]] == [2.0]
    assert content["begun"] == asdict(other)
    # The row that ended the process is a failure, and the others follow.
    last = replace(ROW, batch=3)
    monkeypatch.setattr(
        gpu_rows, "items", plans((ROW, AssertionError()), (other, AssertionError()), (last, TIMED))
    )
    assert run(output, TINY, "cpu", 1.0) is False
    content = json.loads(output.read_text())
    assert content["complete"] is True
    assert [row["batch"] for row in content["rows"]] == [1, 2, 3]
    assert [row["error"] for row in content["rows"]] == [None, "ended the process", None]
    shown = capsys.readouterr().out
    assert "moexport, dense" in shown and "measured rates: stream_gb_s" in shown


def test_rows_without_time_are_left_for_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_rows, "items", plans((ROW, TIMED)))
    assert run(tmp_path / "rows.json", TINY, "cpu", 0.0)
    assert json.loads((tmp_path / "rows.json").read_text())["complete"] is False
    assert "no time was left for 1 rows" in capsys.readouterr().out


def test_a_defect_is_a_row_and_so_is_a_refusal() -> None:
    failed = gpu_rows.measured(ROW, lambda: give(RuntimeError("out of memory")))  # type: ignore[arg-type,return-value]
    assert (failed.passed, failed.error) == (False, "RuntimeError: out of memory")
    table = results_table([asdict(failed), asdict(replace(ROW, **TIMED))], None)
    assert "out of memory" in table


@pytest.mark.slow
def test_all_of_it_runs_in_small_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part has rows; graphs and forms of PyTorch give PyTorch's outputs."""
    output = tmp_path / "rows.json"
    assert run(output, TINY, "cpu", 30.0)
    content = json.loads(output.read_text())
    assert content["complete"] is True
    rows = [Measured(**row) for row in content["rows"]]
    assert {row.part for row in rows} == {"ViT", "recorded", TINY.layers[0].name}
    whats = {row.what for row in rows if row.part == "ViT"}
    assert {"moexport, auto", "moexport, dense", "PyTorch, grouped_mm"} <= whats
    for row in rows:
        assert row.passed
        if row.error is None and row.part != "recorded":
            assert row.gpu_ms and row.host_ms and row.limit_ms and row.over_limit
        if row.error is None and row.part == "recorded":
            assert row.off is not None and row.off < 1e-2
        if row.replay_off is not None:
            assert row.replay_off == 0
    assert "array to array ms" in capsys.readouterr().out
