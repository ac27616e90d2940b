"""Labelled data: what a file may hold, and messages that name file and array."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.bench.data import LabelledData, labelled, open_labelled
from moexport.bench.runners.base import first_of
from moexport.errors import FeedError
from moexport.exporter.model import TensorSpec
from moexport.tests.recorded import read_case

X = np.linspace(0, 1, 12, dtype=np.float64).reshape(4, 3)
SPEC = TensorSpec("input", "float32", ("batch", 3))


@pytest.mark.parametrize("name", ["label", "labels", "y"])
def test_labels_are_found_by_their_usual_names(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "d.npz", input=X, **{name: np.array([0, 1, 2, 1])})  # type: ignore[arg-type]
    data = open_labelled(str(tmp_path / "d.npz"), SPEC).head(9)
    assert data.inputs.dtype == np.float32
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 2, 1]


def test_the_only_array_beside_labels_is_the_input(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", images=X)
    data = open_labelled(str(tmp_path / "d.npz"), SPEC)
    assert (data.samples, data.labelled) == (4, False)
    assert data.head(4).input_name == "images"
    np.savez(tmp_path / "d.npz", images=X, y=np.arange(4))
    assert open_labelled(str(tmp_path / "d.npz"), SPEC).labelled


def test_an_archive_is_read_in_parts(tmp_path: Path) -> None:
    x = np.zeros((64, 1 << 18), np.float32)  # 64 MB
    np.savez(tmp_path / "d.npz", input=x, label=np.arange(64))
    del x
    tracemalloc.start()
    data = open_labelled(str(tmp_path / "d.npz"), SPEC)
    seen = [(len(inputs), labels) for inputs, labels in data.stream(5)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [count for count, _ in seen] == [5] * 12 + [4]
    assert np.concatenate([labels for _, labels in seen if labels is not None]).tolist() == list(
        range(64)
    )
    assert peak < 24 << 20


def test_other_content_is_other_data(tmp_path: Path) -> None:
    found = []
    for x in (X, X + 1e-9, X):
        np.savez(tmp_path / "d.npz", input=x, label=np.arange(4))
        found.append(open_labelled(str(tmp_path / "d.npz"), SPEC).fingerprint)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": X, "b": X}, "contains a, b, but no array 'input'"),
        ({"label": np.arange(4)}, "contains label, but no array 'input'"),
        ({"input": X, "label": np.arange(3)}, "'label' has 3 labels for the 4 samples"),
        ({"input": X, "y": np.eye(4)}, r"'y' has shape \(4, 4\)"),
        ({"input": X, "y": np.array([0, 1, -2, 1])}, "negative label -2 at index 2"),
        (
            {"input": X, "y": np.eye(4)[None]},
            r"'y' has shape \(1, 4, 4\), which labels cannot have",
        ),
        ({"input": X, "y": np.array(list("abcd"))}, "dtype <U1, but labels are numbers"),
        ({"input": X, "y": np.array([0, 1, np.nan, 1])}, "NaN or infinite"),
        ({"input": X, "y": np.array([[0, 1], [1, 1], [0, 2], [1, 0]])}, r"value 2 at index \[2, 1"),
        ({"input": X, "y": np.array([[-1.0, 1], [1, 1], [1, -1], [1, 1]])}, r"value -1 at index"),
        ({"input": X[:0]}, "contains no samples"),
        ({"input": X * np.nan}, "NaN"),
    ],
)
def test_unusable_files_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(FeedError, match=message) as caught:
        open_labelled(str(tmp_path / "d.npz"), SPEC)
    assert "d.npz" in caught.value.message


@pytest.mark.parametrize("name", ["input", "label"])
def test_an_array_of_objects_is_told_how_to_be_saved(tmp_path: Path, name: str) -> None:
    arrays = {"input": X, "label": np.arange(4)}
    arrays[name] = arrays[name].astype(object)
    np.savez(tmp_path / "d.npz", allow_pickle=True, **arrays)
    with pytest.raises(FeedError, match="Python objects") as caught:
        open_labelled(str(tmp_path / "d.npz"), SPEC).head(4)
    assert "d.npz" in caught.value.message
    assert "np.array(x.tolist())" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("labels", "hint"), [(np.arange(4)[:, None], "ravel"), (np.eye(4), "argmax")]
)
def test_labels_of_another_shape_are_told_how_to_be_saved(
    tmp_path: Path, labels: np.ndarray, hint: str
) -> None:
    np.savez(tmp_path / "d.npz", input=X, label=labels)
    with pytest.raises(FeedError, match=r"attributes are 0 or 1|one-hot classes") as caught:
        open_labelled(str(tmp_path / "d.npz"), SPEC)
    assert hint in str(caught.value.hint)


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.npz").write_bytes(b"PK\x03\x04 not really")
    for name in ("d.npz", "gone.npz"):
        with pytest.raises(FeedError, match=name):
            open_labelled(str(tmp_path / name), SPEC)


def test_labels_that_are_no_whole_numbers_are_no_classes() -> None:
    data = LabelledData(X, np.array([0, 1, 0.5, 1]), "input", "label")
    with pytest.raises(FeedError, match="not whole numbers"):
        data.check_classes(10)


def test_labels_beyond_the_model_are_named() -> None:
    data = LabelledData(X, np.array([0, 1, 12, 10]), "input", "label")
    data.check_classes(13)
    with pytest.raises(FeedError, match=r"2 labels outside 0\.\.9; the first is 12 at index 2"):
        data.check_classes(10)


def test_batches_cover_the_data_and_go_round() -> None:
    data = LabelledData(X, None)
    assert [(s.start, s.stop) for s in data.batches(3)] == [(0, 3), (3, 4)]
    assert np.array_equal(first_of(data.batch(1, 3)), X[[3, 0, 1]])
    assert first_of(data.batch(0, 6)).shape == (6, 3)


def test_inputs_without_an_axis_that_may_be_left_out_have_it(tmp_path: Path) -> None:
    model = moexport.load(read_case("mumoe_cp").weights, config={"act": "entmax15"})
    x = np.random.default_rng(0).standard_normal((6, 24)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, label=np.arange(6))
    for data in (labelled(x, model, 1), labelled(tmp_path / "d.npz", model, 1)):
        assert data.head(9).inputs.shape == (6, 1, 24)
        ((first, _), _) = data.stream(4)
        assert np.array_equal(first_of(first)[:, 0], x[:4])
