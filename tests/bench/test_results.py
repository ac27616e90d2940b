"""results.json: what is written is read back, and what is wrong with a file is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moexport.bench.report.text import rows_table
from moexport.bench.results import Results, Row, from_json, read, to_json, write
from moexport.errors import ResultsError

RowMaker = Callable[..., Row]


def test_results_survive_a_round_trip(results: Results, tmp_path: Path) -> None:
    write(results, tmp_path / "results.json")
    assert read(tmp_path / "results.json") == results
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_the_file_has_the_keys_that_scripts_rely_on(results: Results) -> None:
    body = json.loads(to_json(results))
    assert {"schema", "environment", "model", "rows"} <= set(body)
    assert body["schema"] == 1
    row = body["rows"][1]
    assert {
        "engine", "provider", "precision", "lowering", "k", "experts", "batch", "latency_ms",
        "scope", "throughput", "peak_memory_mb", "accuracy", "routing", "parity",
    } <= set(row)  # fmt: skip
    assert {
        "median", "p90", "p95", "p99", "min", "max", "mean", "std", "n", "rounds",
    } <= set(row["latency_ms"])  # fmt: skip
    assert {"top1", "retention", "n"} <= set(row["accuracy"])
    assert set(row["routing"]) == {"jaccard", "exact", "choices", "ties"}
    assert set(row["parity"]) == {"max_abs", "cosine"}


def test_unknown_keys_of_a_later_version_are_passed_over(results: Results) -> None:
    body = json.loads(to_json(results))
    body["novelty"] = body["rows"][0]["novelty"] = 1
    assert from_json(json.dumps(body)) == results


def test_a_file_with_one_model_only_is_read(results: Results) -> None:
    body = json.loads(to_json(results))
    del body["models"]
    assert from_json(json.dumps(body)).models == results.models


Break = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b.pop("rows"), "field rows is missing"),
        (lambda b: b.update(rows={}), "field rows should be a list, not an object"),
        (lambda b: b["rows"][1].pop("k"), r"field rows\[1\]\.k is missing"),
        (lambda b: b["rows"][1].update(k="4"), r"rows\[1\]\.k should be a whole number, not text"),
        (lambda b: b["rows"][1].update(k=True), r"rows\[1\]\.k should be a whole number"),
        (lambda b: b["rows"][1].update(k=17), r"rows\[1\]\.k is 17, .* 16 experts"),
        (
            lambda b: b["rows"][1]["latency_ms"].update(p90=None),
            r"rows\[1\]\.latency_ms\.p90 should be a number, not null",
        ),
        (
            lambda b: b["rows"][1]["latency_ms"].update(rounds=[1, "x"]),
            r"latency_ms\.rounds\[1\] should be a number, not text",
        ),
        (lambda b: b["environment"].update(gpu=True), r"environment\.gpu should be a list"),
        (
            lambda b: b["environment"].update(gpu=["x"]),
            r"environment\.gpu\[0\] should be an object",
        ),
        (lambda b: b["environment"].update(cpu=3), r"environment\.cpu should be an object"),
        (lambda b: b.update(schema=2), "schema 2"),
    ],
)
def test_a_bad_file_is_named_with_its_field(results: Results, spoil: Break, message: str) -> None:
    body = json.loads(to_json(results))
    spoil(body)
    with pytest.raises(ResultsError, match=message) as caught:
        from_json(json.dumps(body), name="old.json")
    assert caught.value.message.startswith("old.json: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_what_is_no_results_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ResultsError, match=r"results\.json"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"nowhere\.json"):
        read(tmp_path / "nowhere.json")


def test_rows_that_failed_for_one_reason_are_one_line(results: Results, row: RowMaker) -> None:
    reason = "no BF16 kernels"
    failed = [
        row(k, 1.0, None, latency_ms=None, error=reason, precision="bf16", batch=batch)
        for batch in (1, 16)
        for k in (16, 4)
    ]
    told = rows_table(replace(results, rows=(*results.rows, *failed)))
    assert [line for line in told.splitlines() if line.startswith("failed")] == [
        "failed: ONNX Runtime, grouped, k = 8: RuntimeError: <no such op>",
        "failed: ONNX Runtime, grouped, BF16, k = 16, 4: no BF16 kernels",
    ]
