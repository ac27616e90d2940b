"""Shards hold what an `.npz` of the same inputs holds, in its order, and are whole or refused."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from moexport.bench.data import Labelled, open_labelled
from moexport.calibration.feeds import batches, labelled_batches, named_batches
from moexport.errors import FeedError, UsageError
from moexport.exporter.model import TensorSpec
from PIL import Image
from pyarrow import parquet

X = np.random.default_rng(0).standard_normal((70, 3, 4)).astype(np.float32)
Y = np.arange(70) % 5
PICTURES = np.random.default_rng(1).integers(0, 256, (6, 8, 8, 3), np.uint8)
SPEC = TensorSpec("input", "float32", ("batch", 3, 8, 8))

loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=16
)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for key, fields in samples.items():
            for ending, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def arrays(rows: slice) -> dict[str, dict[str, bytes]]:
    numbers = range(70)[rows]
    return {f"d/{i:04d}": {"npy": npy(X[i]), "cls": str(Y[i]).encode()} for i in numbers}


def in_shards(folder: Path) -> str:
    write_tar(folder / "x-000.tar", arrays(slice(0, 40)))
    write_tar(folder / "x-001.tar", arrays(slice(40, 70)))
    return f"{folder}/x-{{000..001}}.tar"


def in_parquet(folder: Path) -> str:
    path = folder / "x.parquet"
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(X)
    parquet.write_table(pa.table({"input": column, "label": Y}), path)
    return str(path)


def in_lists(folder: Path) -> str:
    path = folder / "lists.parquet"
    table = {"input": X.tolist(), "label": Y, "name": [str(i) for i in Y]}
    parquet.write_table(pa.table(table, schema=SCHEMA), path)
    return str(path)


SCHEMA = pa.schema(
    [
        ("input", pa.list_(pa.list_(pa.float32()))),
        ("label", pa.int64()),
        ("name", pa.string()),
    ]
)


@pytest.mark.parametrize("written", [in_shards, in_parquet, in_lists])
def test_shards_hold_inputs_and_labels_in_their_order(written: object, tmp_path: Path) -> None:
    assert callable(written)
    feed = written(tmp_path)
    assert np.array_equal(np.concatenate(list(batches(feed, "input"))), X)
    pairs = list(labelled_batches(feed, "input"))
    assert np.array_equal(np.concatenate([labels for _, labels in pairs if labels is not None]), Y)
    assert np.array_equal(np.concatenate(list(batches(str(tmp_path), "input"))), X)


def test_a_data_loader_by_name_gives_inputs_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "shards_here", sys.modules[__name__])
    pairs = list(labelled_batches("shards_here:loader", "input"))
    assert np.array_equal(np.concatenate([inputs for inputs, _ in pairs]), X)
    assert np.array_equal(np.concatenate([labels for _, labels in pairs if labels is not None]), Y)


def test_several_inputs_are_fields_of_their_names(tmp_path: Path) -> None:
    ids = np.arange(6).reshape(2, 3)
    samples = {str(i): {"ids.npy": npy(ids[i]), "mask.npy": npy(ids[i] > 0)} for i in range(2)}
    feed = str(write_tar(tmp_path / "x.tar", samples))
    (found,) = named_batches(feed, ("ids", "mask"))
    assert np.array_equal(found["ids"], ids)
    assert np.array_equal(found["mask"], ids > 0)


def images_tar(folder: Path) -> Path:
    samples = {str(i): {"png": png(PICTURES[i]), "cls": b"%d" % i} for i in range(6)}
    return write_tar(folder / "images.tar", samples)


def images_parquet(folder: Path) -> Path:
    path = folder / "images.parquet"
    rows = [{"bytes": png(each), "path": None} for each in PICTURES]
    parquet.write_table(pa.table({"image": rows, "label": np.arange(6)}), path)
    return path


@pytest.mark.parametrize("written", [images_tar, images_parquet])
def test_images_of_shards_are_read_as_those_of_a_folder(written: object, tmp_path: Path) -> None:
    assert callable(written)
    for i, picture in enumerate(PICTURES):
        (tmp_path / "folder" / str(i)).mkdir(parents=True)
        Image.fromarray(picture).save(tmp_path / "folder" / str(i) / "a.png")

    def all_of(data: Labelled) -> tuple[np.ndarray, np.ndarray]:
        head = data.head(10)
        assert head.labels is not None
        return head.inputs, head.labels

    path = written(tmp_path)
    expected = all_of(open_labelled(str(tmp_path / "folder"), SPEC, "imagenet"))
    for found, wanted in zip(
        all_of(open_labelled(str(path), SPEC, "imagenet")), expected, strict=True
    ):
        assert np.array_equal(found, wanted)
    with pytest.raises(UsageError, match="--pixels"):
        open_labelled(str(path), SPEC)
    with pytest.raises(FeedError, match="holds images"):
        list(batches(str(path), "input"))


def test_a_shard_that_is_missing_is_named_with_how_many_there_should_be(tmp_path: Path) -> None:
    in_shards(tmp_path)
    feed = f"{tmp_path}/x-{{000..002}}.tar"
    with pytest.raises(FeedError, match=r"x-002\.tar: no such file; it is one of 3 shards"):
        list(batches(feed, "input"))


@pytest.mark.parametrize("kept", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_shard_that_is_cut_short_is_named(kind: str, kept: float, tmp_path: Path) -> None:
    feed = in_parquet(tmp_path) if kind == "parquet" else str(tmp_path / "x-000.tar")
    if kind == "tar":
        in_shards(tmp_path)
    data = Path(feed).read_bytes()
    Path(feed).write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(FeedError, match="cut short") as caught:
        list(batches(feed, "input"))
    assert feed in caught.value.message


def test_a_tar_that_ends_between_two_samples_is_cut_short(tmp_path: Path) -> None:
    feed = write_tar(tmp_path / "x.tar", arrays(slice(0, 4)))
    with tarfile.open(feed) as archive:
        end = archive.getmembers()[2].offset
    feed.write_bytes(feed.read_bytes()[:end])
    with pytest.raises(FeedError, match="cut short"):
        list(batches(feed, "input"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"npy": npy(np.array([None], object))}, "Python objects"),
        ({"npy": b"\x93NUMPY\x01\x00"}, r"not a readable \.npy"),
        ({"cls": b"cat"}, "the number of a class"),
        ({"txt": b"a"}, "nothing that is read"),
        ({"a.npy": npy(X[0]), "b.npy": npy(X[0])}, "holds a, b, but no field 'input'"),
    ],
)
def test_a_sample_that_is_no_input_is_refused_by_its_file(
    fields: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    feed = write_tar(tmp_path / "x.tar", {"0": fields})
    with pytest.raises(FeedError, match=said) as caught:
        list(batches(feed, "input"))
    assert str(feed) in caught.value.message
