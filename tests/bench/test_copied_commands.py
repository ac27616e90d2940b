"""Every command that the page copies makes the graph that was measured, or runs its bundle."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from moexport.bench.graph_hash import graph_hash
from moexport.bench.report.page import export_command
from moexport.bench.results import ModelInfo, Results, RoutingAgreement, Row, read
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.command import run
from moexport.tests.recorded import DATA, VIT_SETS, many_experts, read_case

VIT = (DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS)
QUICK = ("--no-memory", "--threads", "1", "--samples", "8", "--engine", "onnxruntime")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("inputs.npz", input=read_case("soft_moe_vit").x)
    return Path("inputs.npz")


def benched(*words: str | Path) -> Results:
    done = run("bench", *words, "-o", "report", *QUICK)
    assert done.code == 0, done.err
    return read(Path("report/results.json"))


def copied(results: Results) -> list[tuple[Row, str]]:
    """The rows of graphs, each with its command."""
    rows = [row for row in results.rows if not row.engine.startswith("pytorch")]
    assert all(row.error is None for row in rows), [row.error for row in rows]
    commands = [(row, export_command(results, row)) for row in rows]
    assert all(command for _, command in commands)
    return [(row, command) for row, command in commands if command]


def made_again(row: Row, command: str, folder: str) -> str:
    """The hash of the graph that a bundle of the command has for the batch size of the row."""
    words = shlex.split(command)
    words[words.index("-o") + 1] = folder
    done = run(*words[1:])
    assert done.code == 0, (command, done.err)
    bundle = Bundle.open(folder)
    record = bundle.manifest.graph_for(row.batch)
    assert bundle.manifest.precision == row.precision
    return graph_hash(bundle.graph_file(record.file))


def check(results: Results) -> None:
    for number, (row, command) in enumerate(copied(results)):
        assert made_again(row, command, f"bundle-{number}") == row.graph_sha256, command


def test_rows_of_a_model_in_floats(data: Path) -> None:
    lowerings = ("--lowering", "grouped,dense,auto", "--precision", "fp32,fp16")
    results = benched(*VIT, "--k", "n,0.5", "--batch", "1,3", *lowerings, "--data", data)
    assert {row.batch for row in results.rows} == {1, 3}
    check(results)


def test_rows_of_a_model_in_int8(data: Path) -> None:
    int8 = ("--precision", "int8", "--target", "ort-cpu")
    check(benched(*VIT, "--k", "2", *int8, "--data", data))
    (table,) = Path("report").glob("calibration-*.json")
    assert table.read_text(encoding="utf-8").count("experts.input")


@pytest.mark.slow
def test_rows_of_what_auto_chose_for_each_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layer = many_experts(tmp_path)
    results = benched(layer, "--k", "8", "--batch", "1,512", "--target", "ort-cpu")
    assert len({row.graph_sha256 for row, _ in copied(results)}) == 2
    check(results)


FEED = ["--data", "inputs.npz"]


@pytest.mark.parametrize(
    ("precision", "exact", "data", "expected"),
    [
        ("int8", 0.979, "", ["--no-verify"]),
        ("int8", 0.979, "inputs.npz", ["--no-verify"]),
        ("int8", 0.98, "", ["--no-verify"]),  # of other inputs, fewer may have the same experts
        ("int8", 0.98, "inputs.npz", [*FEED, "--verify-samples", "1200"]),
        ("int8", 0.999, "inputs.npz", FEED),
        ("int8", 0.999, "images/", []),
        ("int8", None, "inputs.npz", FEED),
        ("fp32", 0.97, "inputs.npz", FEED),
    ],
)
def test_the_command_of_a_row_compares_what_an_export_accepts(
    precision: str, exact: float | None, data: str, expected: list[str]
) -> None:
    routing = None if exact is None else RoutingAgreement(exact=exact, jaccard=1.0)
    row = Row(
        model="vit",
        precision=precision,
        engine="onnxruntime",
        k=2,
        experts=4,
        batch=1,
        routing=routing,
        deploy=("export", "--k", "2", "--precision", precision),
    )
    typed = "moexport bench vit.pt -o report" + (f" --data {data}" if data else "")
    results = Results(
        models=(ModelInfo("vit", source="vit.pt"),),
        rows=(row,),
        command=typed,
        protocol={"samples": 1000, "ranges": {"held_out": 200}},
    )
    command = export_command(results, row)
    assert command is not None
    assert shlex.split(command)[9:] == expected


def test_rows_of_bundles_run_the_bundle(data: Path) -> None:
    int8 = ("--precision", "int8", "--method", "minmax", "--data", data)
    bundles: dict[str, tuple[str | Path, ...]]
    bundles = {"fixed": ("--k", "2", *int8), "any-k": ("--k", "input")}
    for name, options in bundles.items():
        done = run("export", *VIT, "-o", name, "--target", "ort-cpu", "--no-verify", *options)
        assert done.code == 0, done.err
    results = benched("fixed", "any-k", "--k", "2,4", "--data", data)
    rows = copied(results)
    assert {(row.bundle, row.k) for row, _ in rows} == {("fixed", 2), ("any-k", 2), ("any-k", 4)}
    for number, (row, command) in enumerate(rows):
        words = shlex.split(command)
        assert words[:3] == ["moexport", "run", row.bundle]
        words[words.index("-o") + 1] = f"outputs-{number}.npz"
        done = run(*words[1:])
        assert done.code == 0, (command, done.err)
        assert words[words.index("-i") + 1] == str(data)
        bundle = Bundle.open(str(row.bundle))
        assert graph_hash(bundle.graph_file("model.onnx")) == row.graph_sha256


def test_a_graph_of_other_weights_has_another_hash(data: Path) -> None:
    for name, words in {"two": ("--k", "2"), "again": ("--k", "2"), "one": ("--k", "1")}.items():
        done = run("export", *VIT, "-o", name, "--no-verify", *words)
        assert done.code == 0, done.err
    again = graph_hash(Path("two/model.onnx")), graph_hash(Path("again/model.onnx"))
    assert again[0] == again[1]
    assert graph_hash(Path("one/model.onnx")) != again[0]
    weights = bytearray(Path("two/weights.bin").read_bytes())
    weights[len(weights) // 2] ^= 1
    Path("two/weights.bin").write_bytes(weights)
    assert graph_hash(Path("two/model.onnx")) != again[0]
