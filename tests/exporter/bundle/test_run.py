"""`run` goes through its inputs a batch at a time and overwrites nothing unasked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moexport.common.option import requested
from moexport.errors import FeedError, UsageError
from moexport.exporter.bundle.run import in_batches
from moexport.exporter.requests import RunRequest
from moexport.exporter.session import Session
from moexport.graphs.sizes import AxisRange
from moexport.tests.command import run

X = np.random.default_rng(0).standard_normal((70, 3, 32, 32)).astype(np.float32)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that sessions run."""
    seen: list[int] = []
    real = Session.run

    def spy(self: Session, x: np.ndarray, *rest: object, **named: object) -> object:
        seen.append(len(x))
        return real(self, x, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "run", spy)
    return seen


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"engine": "onnxruntime", "device": "gpu"}, "--device: it belongs to OpenVINO"),
        (
            {"engine": "openvino", "provider": "cuda"},
            "--provider: it belongs to ONNX Runtime, but OpenVINO runs it",
        ),
        (
            {"engine": "tensorrt", "cache": "kept"},
            "--cache: it belongs to OpenVINO, but tensorrt runs the engine",
        ),
        (
            {"engine": "tensorrt", "threads": 2},
            "--threads: it belongs to ONNX Runtime, but tensorrt runs the engine",
        ),
    ],
)
@pytest.mark.plugins
def test_an_option_of_another_runtime_is_refused_with_whose_it_is(
    asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as told:
        requested(RunRequest, asked)
    assert told.value.message == message


@pytest.mark.plugins
def test_what_the_runtime_takes_is_not_refused() -> None:
    RunRequest(engine="onnxruntime", provider="cuda", threads=2)
    theirs = {"device": "gpu", "cache": "kept"}
    request = requested(RunRequest, {"engine": "openvino", "threads": 2} | theirs)
    assert request.session_options == theirs
    requested(RunRequest, {"provider": "cuda"} | theirs)  # the bundle says who runs it


def test_batches_are_no_larger_than_the_bundle_was_exported_for(
    exported: Path, tmp_path: Path, sizes: list[int]
) -> None:
    np.savez(tmp_path / "x.npz", input=X)
    outcome = run("run", exported, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert outcome.code == 0, outcome.err
    assert sizes == [32, 32, 6]
    assert "running" in outcome.err
    with np.load(tmp_path / "y.npz") as arrays:
        first = arrays["output"]
    assert first.shape == (70, 10)
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "z.npz")
    assert run("run", exported, *files, "--batch-size", "7").code == 0
    assert sizes[3:] == [7] * 10
    with np.load(tmp_path / "z.npz") as arrays:
        np.testing.assert_allclose(arrays["output"], first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", ["33", "1000000"])
def test_a_batch_outside_the_bundles_range_is_refused(
    size: str, exported: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=X[:2])
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    outcome = run("run", exported, *files, "--batch-size", size)
    assert outcome.code == 2
    assert f"--batch-size {size}: the bundle was exported for batches of 1:1:32" in outcome.error
    assert outcome.hint.startswith("choose 1 to 32")
    assert not (tmp_path / "y.npz").exists()


def test_an_output_that_exists_is_replaced_only_when_forced(exported: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=X[:2])
    (tmp_path / "y.npz").write_bytes(b"mine")
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    outcome = run("run", exported, *files)
    assert (outcome.code, outcome.hint) == (1, "--force replaces it")
    assert (tmp_path / "y.npz").read_bytes() == b"mine"
    assert run("run", exported, *files, "--force").code == 0
    with np.load(tmp_path / "y.npz") as arrays:
        assert arrays["output"].shape == (2, 10)


def parts(*lengths: int) -> Iterator[np.ndarray]:
    start = 0
    for length in lengths:
        yield np.arange(start, start + length)
        start += length


@pytest.mark.parametrize(
    ("lengths", "sizes", "expected"),
    [
        ((70,), (1, 32, 32), [32, 32, 6]),
        ((3, 3, 3), (1, 4, 4), [4, 4, 1]),
        ((1,) * 10, (1, 4, 32), [4, 4, 2]),
        ((9,), (4, 8, 8), [5, 4]),
        ((16,), (8, 8, 8), [8, 8]),
        ((2, 2), (1, 100, 100), [4]),
        ((9,), (8, 8, 16), [9]),
        ((19,), (8, 8, 8), [8, 11]),  # which the graph refuses
        ((0,), (1, 4, 4), [0]),
    ],
)
def test_inputs_are_shared_out_to_batches_of_a_size_that_is_taken(
    lengths: tuple[int, ...], sizes: tuple[int, int, int], expected: list[int]
) -> None:
    found = list(in_batches(parts(*lengths), AxisRange(*sizes)))
    assert [len(each) for each in found] == expected
    assert np.concatenate(found).tolist() == list(range(sum(lengths)))


def test_what_makes_up_no_batch_is_refused() -> None:
    for length, sizes in ((13, (8, 8, 12)), (3, (4, 8, 8))):
        with pytest.raises(FeedError, match=f"{length} inputs are left, but the bundle was export"):
            list(in_batches(parts(length), AxisRange(*sizes)))
