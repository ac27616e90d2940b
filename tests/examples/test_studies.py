"""The papers' experiments: their numbers, their scale, and small runs of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from moexport.bench.results import read
from moexport.common.console import Silent
from moexport.common.timing import MIN_ROUNDS
from moexport.examples.studies.l2norm import NormTask, run_l2norm
from moexport.examples.studies.latency import (
    TABLE_3,
    fitting,
    latency_rows,
    parameters,
    passes_for,
    run_latency,
    run_whole,
)
from moexport.examples.studies.mnist import Suite, kept, run_mnist
from moexport.examples.studies.multilinear import TABLE_8, work
from moexport.plugins.studies.findings import studies_in

pytestmark = pytest.mark.slow


def test_the_paper_s_shape_has_2_27_billion_parameters_and_is_halved_until_it_fits() -> None:
    assert parameters(TABLE_3) == 2_264_924_160
    assert fitting(TABLE_3, 1 << 50) == TABLE_3
    small = fitting(TABLE_3, 24 << 30)
    assert (small.layers, small.experts, small.dim, small.tokens) == (6, 8, 768, 197)
    assert 64 * 4 * parameters(small) <= 24 << 30 < 2 * 64 * 4 * parameters(small)


def test_the_paper_s_size_is_kept_where_two_copies_of_the_weights_fit() -> None:
    whole = 4 * parameters(TABLE_3)
    assert fitting(TABLE_3, 24 << 30, 2.2) == TABLE_3
    assert fitting(TABLE_3, 2 * whole, 2.2).hidden == TABLE_3.hidden // 2


def test_passes_are_the_paper_s_where_they_are_affordable() -> None:
    fast = passes_for(TABLE_3, 1e-3, 8)
    assert (fast.warmup, fast.timed, MIN_ROUNDS * fast.inputs) == (100, 100, 100)
    slow = passes_for(TABLE_3, 10.0, 8)
    assert (slow.warmup, slow.timed) == (1, 5)


@pytest.mark.parametrize("form", ["CP", "TR"])
def test_table_8_is_counted_from_the_shapes(form: str) -> None:
    found, (naive, factorised) = work(form), TABLE_8[form]
    assert found.naive == pytest.approx(naive, rel=5e-4)
    assert found.factorised == pytest.approx(factorised, rel=0.035)  # printed with two digits


def test_a_small_suite_is_trained_exported_and_analysed(tmp_path: Path) -> None:
    _, text = run_mnist(Suite((4,), epochs=2, seeds=2), tmp_path, Silent(), command="bench")
    results = read(tmp_path / "results.json")
    (study,) = studies_in(results.analyses)
    assert (study.model, study.experts, study.samples) == ("digits, n = 4", 4, 360)
    assert {row.k for row in results.rows} == {4, *kept(4)} == {4, 2, 1}
    assert [row.error for row in results.rows] == [None] * len(results.rows)
    untouched = next(row for row in results.rows if row.is_reference)
    assert untouched.accuracy is not None and untouched.accuracy.top1 == study.top1
    for row in results.rows:  # the exported graphs keep what the analysis says
        assert row.accuracy is not None
        assert row.accuracy.retention == pytest.approx(study.kept(row.k), abs=0.01)
    assert "Accuracy kept by Algorithm 1" in text
    assert (tmp_path / "experts_retention.png").stat().st_size > 10_000
    assert (tmp_path / "digits-n4-2-epochs.pt").is_file()


def test_several_small_experts_learn_a_norm_that_one_large_one_does_not(tmp_path: Path) -> None:
    task = NormTask(experts=(1, 16), steps=250, seeds=1, learning_rate=1e-2)
    results, text = run_l2norm(tmp_path, Silent(), task=task)
    one, several = results.analyses["l2norm"]["losses"]
    assert one["parameters"] - 1 - 4 == several["parameters"] - 16 * (1 + 4)  # but phi and biases
    assert one["test"] > 0.5 and one["train"] > 0.5
    assert several["test"] < 0.5 * one["test"]
    kept_file = read(tmp_path / "results.json").analyses["l2norm"]
    assert kept_file["losses"] == results.analyses["l2norm"]["losses"]
    assert (tmp_path / "l2norm.png").stat().st_size > 10_000
    assert "16          16" in text


def test_a_small_stack_is_timed_for_every_k(tmp_path: Path) -> None:
    shape = replace(TABLE_3, layers=2, dim=32, hidden=16, tokens=12, warmup=2, timed=5)
    results, text = run_latency(tmp_path, Silent(), shape=shape, batches=(1,), threads=1)
    assert [row.error for row in results.rows] == [None] * len(results.rows)
    assert {row.k for row in results.rows} == {8, 6, 4, 2}
    assert [row[:2] for row in latency_rows(results)] == [("1", str(k)) for k in (8, 6, 4, 2)]
    assert "2 layers, n=8, d=32, h=16" in text


def test_a_stack_is_timed_with_one_engine_open_at_a_time(tmp_path: Path) -> None:
    shape = replace(TABLE_3, layers=2, dim=32, hidden=64, tokens=12, warmup=2, timed=5)
    room = int(2.5 * 4 * parameters(shape))
    results, text = run_whole(
        tmp_path, Silent(), shape=shape, batches=(1, 2), threads=1, memory=room
    )
    assert "2 copies of the weights fit; one engine at a time" in text
    assert results.analyses["latency"]["shape"]["hidden"] == 64
    assert len(results.rows) == 2 * (1 + 3 + 4)
    table = list(latency_rows(results))
    assert [row[:2] for row in table] == [(b, str(k)) for b in "12" for k in (8, 6, 4, 2)]
    assert all("–" not in row[2:5] for row in table)
    assert read(tmp_path / "results.json").rows == results.rows
