"""Labelled data: what a file may hold, and messages that name file and array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from moexport.bench.data import LabelledData, load_labelled
from moexport.errors import FeedError

X = np.linspace(0, 1, 12, dtype=np.float64).reshape(4, 3)


@pytest.mark.parametrize("name", ["label", "labels", "y"])
def test_labels_are_found_by_their_usual_names(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "d.npz", input=X, **{name: np.array([0, 1, 2, 1])})  # type: ignore[arg-type]
    data = load_labelled(tmp_path / "d.npz")
    assert data.inputs.dtype == np.float32
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 2, 1]


def test_the_only_float_array_is_the_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", images=X)
    data = load_labelled(tmp_path / "d.npz")
    assert data.input_name == "images"
    assert data.labels is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": X, "b": X}, "2 float arrays to take instead; the file holds 'a', 'b'"),
        ({"label": np.arange(4)}, "no array 'input', and no float array"),
        ({"input": X, "label": np.arange(3)}, "'label' holds 3 labels for the 4 samples"),
        ({"input": X, "y": np.eye(4)}, r"'y' has shape \(4, 4\)"),
        ({"input": X, "y": np.array([0, 1, -2, 1])}, "negative label -2 at index 2"),
        ({"input": X, "y": np.array([0, 1, 0.5, 1])}, "not whole numbers"),
        ({"input": X[:0]}, "holds no samples"),
        ({"input": X * np.nan}, "NaN"),
    ],
)
def test_unusable_files_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(FeedError, match=message) as caught:
        load_labelled(tmp_path / "d.npz")
    assert "d.npz" in caught.value.message


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_bytes(b"PK\x03\x04 not really")
    for name in ("d.npz", "gone.npz"):
        with pytest.raises(FeedError, match=name):
            load_labelled(tmp_path / name)


def test_labels_beyond_the_model_are_named() -> None:
    data = LabelledData(X, np.array([0, 1, 12, 10]), "input", "label")
    data.check_classes(13)
    with pytest.raises(FeedError, match=r"2 labels outside 0\.\.9; the first is 12 at index 2"):
        data.check_classes(10)


def test_batches_cover_the_data_and_go_round() -> None:
    data = LabelledData(X, None)
    assert [(s.start, s.stop) for s in data.batches(3)] == [(0, 3), (3, 4)]
    assert np.array_equal(data.batch(1, 3), X[[3, 0, 1]])
    assert data.batch(0, 6).shape == (6, 3)
