"""`moexport calibrate`: writes a table, uses one that is there, refuses one of something else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pyarrow as pa
import pytest
from moexport.errors import CalibrationError, OutputError, UsageError
from moexport.exporter.export import ranges_for
from moexport.exporter.job import check_table, export_job
from moexport.exporter.options import ExportOptions
from moexport.exporter.trace import trace
from moexport.tests.command import run
from moexport.tests.recorded import DATA, read_case
from pyarrow import parquet

WEIGHTS = DATA / "soft_moe_lucidrains" / "weights.pt"
X = np.random.default_rng(0).standard_normal((12, 5, 32)).astype(np.float32)


def int8(k: str) -> ExportOptions:
    return ExportOptions(k=k, target="ort-cpu", precision="int8")


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("feed") / "x.npz"
    np.savez(path, input=X)
    return path


@pytest.fixture(scope="module")
def table(feed: Path) -> Path:
    """A table with k = 2 and the default method."""
    path = feed.parent / "table.json"
    outcome = run("calibrate", WEIGHTS, "--data", feed, "-o", path, "--k", "2")
    assert outcome.code == 0, outcome.err
    assert "inputs/s" in outcome.err
    return path


def test_a_table_says_what_it_was_made_from(table: Path) -> None:
    content: dict[str, Any] = json.loads(table.read_text())
    assert content["schema"] == 1
    origin = content["origin"]
    assert (origin["samples"], origin["method"], origin["k"]) == (12, "percentile", {"layer": 2})
    assert all(re.fullmatch("[0-9a-f]{64}", origin[key]) for key in ("model", "feed"))
    assert set(content["ranges"]) == {"layer/experts.input", "layer/experts.hidden"}
    assert [path.name for path in sorted(table.parent.iterdir())] == ["table.json", "x.npz"]


def test_a_feed_of_shards_says_how_many_inputs_it_gave(tmp_path: Path) -> None:
    parquet.write_table(
        pa.table({"input": pa.FixedShapeTensorArray.from_numpy_ndarray(X)}), tmp_path / "x.parquet"
    )
    data, place = tmp_path / "x.parquet", tmp_path / "table.json"
    outcome = run("calibrate", WEIGHTS, "--data", data, "-o", place, "--k", "2")
    assert outcome.code == 0, outcome.err
    assert "the feed has 12 inputs" in outcome.err


def test_the_same_calibration_uses_the_table_that_is_there(table: Path, feed: Path) -> None:
    before = table.stat().st_mtime_ns
    outcome = run("calibrate", WEIGHTS, "--data", feed, "-o", table, "--k", "2", "--json")
    assert outcome.code == 0
    assert "up to date" in outcome.err
    assert table.stat().st_mtime_ns == before
    assert json.loads(outcome.out) == json.loads(table.read_text())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--k", "1"), "for k = 2, not 1"),
        (("--k", "2", "--method", "minmax"), "method percentile 99.99, not minmax"),
        (("--k", "2", "--percentile", "99"), "method percentile 99.99, not percentile 99"),
        (("--k", "2", "--samples", "11"), "for another feed (12 inputs)"),
        (("--k", "2", "--renormalize"), "without --renormalize"),
    ],
)
def test_a_table_of_another_origin_is_refused_with_the_reason(
    options: tuple[str, ...], reason: str, table: Path, feed: Path
) -> None:
    outcome = run("calibrate", WEIGHTS, "--data", feed, "-o", table, *options)
    assert (outcome.code, outcome.out) == (1, "")
    assert reason in outcome.error
    assert "--force" in outcome.err


def test_force_replaces_it(table: Path, feed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "table.json"
    copy.write_bytes(table.read_bytes())
    outcome = run(
        "calibrate", WEIGHTS, "--data", feed, "-o", copy, "--method", "mse", "--force", "-q"
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(copy.read_text())["origin"]["method"] == "mse"
    assert "layer/experts.hidden" in outcome.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "minmax", "--percentile", "99"), "the method minmax has no percentile"),
        (("--percentile", "0.99"), "the value must be above 50 and at most 100"),
        (("--samples", "0"), "--samples 0: must be at least 1"),
        (("--batch", "0"), "--batch 0: must be at least 1"),
        (("--k", "99"), "has 4 experts"),
        (("--k", "input"), "--k input: ranges depend on the number of kept experts"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: tuple[str, ...], message: str, feed: Path, tmp_path: Path
) -> None:
    outcome = run("calibrate", WEIGHTS, "--data", feed, "-o", tmp_path / "t.json", *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.error
    assert not list(tmp_path.iterdir())


def test_an_export_takes_a_table_of_as_many_experts_or_more(table: Path) -> None:
    model = moexport.load(WEIGHTS)
    for k in ("1", "2"):
        made = export_job(model, int8(k), calibration=table).table
        assert made is not None
        assert made.origin.k == {"layer": 2}
    for k in ("3", "n", "input"):
        with pytest.raises(CalibrationError, match="observed with k = 2, but the export keeps"):
            export_job(model, int8(k), calibration=table)


def test_ranges_for_a_k_chosen_per_run_are_those_of_all_experts(feed: Path) -> None:
    options = ExportOptions(k="input", precision="int8")
    job = export_job(moexport.load(WEIGHTS), options, data=feed)
    made = ranges_for(job, trace(job.model))
    assert made is not None
    assert made.origin.k == {"layer": 4}


def test_inputs_without_tokens_give_no_ranges(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=X[:, :0])
    files = ("--data", tmp_path / "x.npz", "-o", tmp_path / "t.json")
    outcome = run("calibrate", WEIGHTS, *files)
    assert (outcome.code, outcome.out) == (1, "")
    assert "input 'input' is empty: (12, 0, 32)" in outcome.error
    assert "leave such inputs out" in outcome.hint


def test_an_export_refuses_a_table_of_other_weights(table: Path) -> None:
    model = moexport.load(WEIGHTS)
    next(iter(model.layers.values())).get_parameter("phi").add_(1e-6)
    made = export_job(moexport.load(WEIGHTS), int8("2"), calibration=table).table
    assert made is not None
    with pytest.raises(CalibrationError, match="another model"):
        check_table(export_job(model, ExportOptions(k=2)), made, "table.json", model)


def test_an_edited_export_takes_its_ranges_from_data_and_no_table(
    table: Path, feed: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", ("--k", "2", "--precision", "int8", "--target", "ort-cpu")
    edited = ("export", WEIGHTS, "-o", out, *options, "--ablate", "layer:1")
    refused = run(*edited, "--calibration", table)
    assert refused.code == 1
    assert "was made from the model without the edits of this export" in refused.error
    assert "leave --calibration out" in refused.hint
    done = run(*edited, "--data", feed)
    assert done.code == 0, done.err


def test_an_export_without_table_and_feed_says_what_to_give() -> None:
    with pytest.raises(UsageError) as caught:
        export_job(moexport.load(WEIGHTS), ExportOptions(precision="int8"))
    assert "--data" in str(caught.value.hint)


@pytest.mark.slow
def test_layers_are_ranked_by_what_int8_does_to_each_alone(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    np.savez(tmp_path / "x.npz", input=case.x)
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    outcome = run(
        *("calibrate", case.weights, "--config", tmp_path / "config.json", "--k", "2", "--json"),
        *("--data", tmp_path / "x.npz", "-o", tmp_path / "t.json", "--sensitivity"),
    )
    assert outcome.code == 0, outcome.err
    layers = json.loads(outcome.out)["layers"]
    assert {layer["layer"] for layer in layers} == {"blocks.2.mlp", "blocks.3.mlp"}
    order = [(layer["routing"], layer["jaccard"], layer["cosine"]) for layer in layers]
    assert order == sorted(order)
    assert all(0.99 < layer["cosine"] < 1 and layer["max_rel"] > 0 for layer in layers)


PEAK = """
import resource, sys
from pathlib import Path
import moexport
model = moexport.load(Path(sys.argv[1]))
moexport.calibrate(model, sys.argv[2], samples=int(sys.argv[3]), batch=100)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    count, pixels = 10_000, 28 * 28
    images = np.random.default_rng(0).random((count, 1, 28, 28), dtype=np.float32)
    np.savez(tmp_path / "x.npz", input=images)
    weights = DATA / "soft_moe_mnist" / "weights.pt"
    peaks = {
        samples: 1024 * int(_python(PEAK, weights, tmp_path / "x.npz", samples))
        for samples in (100, count)
    }
    grown = peaks[count] - peaks[100]
    assert grown < count * pixels * 4 / 2, f"{grown / 1e6:.1f} MB more for 31 MB of inputs"


def _python(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_workspace_that_is_not_there_is_named(feed: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="none: cannot be written: No such file"):
        moexport.calibrate(moexport.load(WEIGHTS), feed, workspace=tmp_path / "none")
    assert not (tmp_path / "none").exists()
