"""Shards hold what an `.npz` of the same inputs holds, in its order, and are whole or refused."""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from moexport.bench.data import Labelled, open_labelled
from moexport.data.feeds import batches, named_batches
from moexport.data.footer import row_groups
from moexport.data.shards import _parquet_batch
from moexport.data.tar import tar_files
from moexport.errors import FeedError, UsageError
from moexport.exporter.model import TensorSpec
from moexport.tests.calibration.reading import labelled_batches
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
    [("input", pa.list_(pa.list_(pa.float32()))), ("label", pa.int64()), ("name", pa.string())]
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
    with pytest.raises(FeedError, match="contains images"):
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
    with pytest.raises(FeedError, match="truncated") as caught:
        list(batches(feed, "input"))
    assert feed in caught.value.message


def test_a_tar_that_ends_between_two_samples_is_cut_short(tmp_path: Path) -> None:
    feed = write_tar(tmp_path / "x.tar", arrays(slice(0, 4)))
    with tarfile.open(feed) as archive:
        end = archive.getmembers()[2].offset
    feed.write_bytes(feed.read_bytes()[:end])
    with pytest.raises(FeedError, match="truncated"):
        list(batches(feed, "input"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"npy": npy(np.array([None], object))}, "Python objects"),
        ({"npy": b"\x93NUMPY\x01\x00"}, r"not a readable \.npy"),
        ({"cls": b"cat"}, "the number of a class"),
        ({"txt": b"a"}, "nothing that can be read"),
        ({"a.npy": npy(X[0]), "b.npy": npy(X[0])}, "contains a, b, but no field 'input'"),
    ],
)
def test_a_sample_that_is_no_input_is_refused_by_its_file(
    fields: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    feed = write_tar(tmp_path / "x.tar", {"0": fields})
    with pytest.raises(FeedError, match=said) as caught:
        list(batches(feed, "input"))
    assert str(feed) in caught.value.message


INDEXES = {
    "sizes.json": {"x-000.tar": 40, "x-001.tar": 30},
    "shardindex.json": {
        "wids_version": 1,
        "shardlist": [
            {"url": "https://example.org/x-000.tar", "nsamples": 40},
            {"url": "x-001.tar", "nsamples": 30},
        ],
    },
    "_info.json": {
        "splits": {
            "train": {"filenames": ["x-000.tar", "x-001.tar"], "shard_lengths": [40, 30]},
            "test": {"filenames": ["t-0.tar"], "shard_lengths": [9]},
        }
    },
}


@pytest.mark.parametrize("name", list(INDEXES))
def test_shards_are_checked_against_an_index_next_to_them(name: str, tmp_path: Path) -> None:
    feed = in_shards(tmp_path)
    (tmp_path / name).write_text(json.dumps(INDEXES[name]))
    assert sum(map(len, batches(feed, "input"))) == 70
    write_tar(tmp_path / "x-001.tar", arrays(slice(40, 60)))
    for each in (feed, str(tmp_path), f"{tmp_path}/x-001.tar"):
        with pytest.raises(FeedError, match=r"x-001\.tar: 20 samples were read, .* lists 30"):
            list(batches(each, "input"))
    (tmp_path / "x-001.tar").unlink()
    with pytest.raises(FeedError, match=r"1 of 2 shards are missing: x-001\.tar"):
        list(batches(str(tmp_path), "input"))
    assert sum(map(len, batches(f"{tmp_path}/x-000.tar", "input"))) == 40


def test_an_index_by_url_is_held_against_too(tmp_path: Path) -> None:
    in_shards(tmp_path)
    (tmp_path / "sizes.json").write_text('{"x-000.tar": 41}')
    system = fsspec.filesystem("memory")
    system.put(f"{tmp_path}/", "/indexed", recursive=True)
    with pytest.raises(FeedError, match=r"memory://indexed/x-000\.tar: 40 samples .* lists 41"):
        list(batches("memory://indexed/x-{000..001}.tar", "input"))


@pytest.mark.parametrize("text", ["[1]", "{}", '{"x-000.tar": "many"}', '{"shardlist": 3}'])
def test_a_file_that_is_called_as_an_index_and_is_none_is_passed_over(
    text: str, tmp_path: Path
) -> None:
    feed = in_shards(tmp_path)
    for name in INDEXES:
        (tmp_path / name).write_text(text)
    assert sum(map(len, batches(feed, "input"))) == 70


def test_shards_whose_names_imply_their_number_are_all_required(tmp_path: Path) -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(X)
    for i in range(3):
        path = tmp_path / f"train-0000{i}-of-00003.parquet"
        parquet.write_table(pa.table({"input": column}), path)
    assert sum(map(len, batches(str(tmp_path), "input"))) == 210
    (tmp_path / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(FeedError, match=r"1 of 3 shards .*: train-00001-of-00003\.parquet"):
        list(batches(str(tmp_path), "input"))


def test_a_footer_that_tells_of_other_rows_than_its_groups_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"input": X[:, 0, 0]}), path)
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    rows = b"\x16" + bytes([140, 1])  # a field of 64 bits, and 70 in zigzag
    at = data.index(rows, start)  # the file's own count comes before those of its groups
    path.write_bytes(data[:at] + b"\x16" + bytes([142, 1]) + data[at + 3 :])
    refused(path, "its footer declares 71 rows, but row groups have 70")


# --- archives that are damaged, or ill meant -----------------------------------------------------


def refused(feed: Path, said: str = "") -> None:
    """Whoever reads the feed is told its name, within a second."""
    started = time.process_time()
    with pytest.raises(FeedError, match=said) as caught:
        list(batches(str(feed), "input"))
    assert time.process_time() - started < 1
    assert str(feed) in caught.value.message


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_common_form_of_tar_is_read_as_python_reads_it(form: int, tmp_path: Path) -> None:
    names = ["a/b.npy", f"{'long/' * 25}x.npy", *([] if not form else [f"{'é' * 150}/y.npy"])]
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=form) as archive:
        archive.addfile(tarfile.TarInfo("folder/"))
        folder = tarfile.TarInfo("folder2")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        link = tarfile.TarInfo("link.npy")
        link.type, link.linkname = tarfile.SYMTYPE, "l" * (150 if form else 50)
        archive.addfile(link)
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(npy(X[0])), 1.5 if form == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(npy(X[0])))
    with tarfile.open(path) as archive, path.open("rb") as file:
        plain = [each for each in archive if each.isfile()]
        expected = [(each.name, archive.extractfile(each).read()) for each in plain]  # type: ignore[union-attr]
        found = [(name, content.read()) for name, content in tar_files(file)]
    assert found == expected
    assert len(found) == len(names) + 1


def test_a_flipped_bit_in_any_header_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    feed = write_tar(tmp_path / "x.tar", arrays(slice(0, 40)))
    whole = feed.read_bytes()
    with tarfile.open(feed) as archive:
        headers = [member.offset for member in archive][20::9]
    for header in headers:
        for place in (0, 99, 124, 130, 148, 156, 257, 300, 511):
            data = bytearray(whole)
            data[header + place] ^= 4
            feed.write_bytes(data)
            refused(feed, "not a complete tar file: a damaged header at byte")


def test_data_after_the_end_of_an_archive_is_an_error(tmp_path: Path) -> None:
    feed = write_tar(tmp_path / "x.tar", arrays(slice(0, 4)))
    whole = feed.read_bytes()
    feed.write_bytes(whole + whole)
    refused(feed, "data after the end")
    feed.write_bytes(whole.rstrip(b"\0") + bytes(-len(whole.rstrip(b"\0")) % 512 + 512))
    refused(feed, "the end of the archive is missing")


def header(name: str, kind: bytes, size: bytes) -> bytes:
    """A header of tar whose checksum is right."""
    start = name.encode().ljust(124, b"\0") + size.ljust(12, b"\0") + b"1".ljust(12, b"\0")
    block = bytearray(start + b" " * 8 + kind + bytes(100) + b"ustar\x0000").ljust(512, b"\0")
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes) -> bytes:
    padded = records.ljust(-(-len(records) // 512) * 512, b"\0")
    return header("pax", b"x", b"%011o" % len(records)) + padded


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header("a.npy", b"0", b"\xff" * 10 + b"\xfe\0"), "header of -512 bytes"),
        (header("a.npy", b"x", b"\xff" * 10 + b"\xfe\0"), "header of -512 bytes"),
        (header("a.npy", b"0", b"-1000"), "header of -512 bytes"),
        (header("a.npy", b"0", b"\x80" + b"\xff" * 11), "truncated"),
        (header("a.npy", b"L", b"\x80" + b"\xff" * 11), "damaged header of"),
        (header("a.npy", b"L", b"0") * 5000, "recursion"),
        (pax(b"1" * 200_000), "have inconsistent lengths"),
        (pax(b"1 " * 100_000), "have inconsistent lengths"),
        (pax(b"2 " * 100_000 + b"="), "have inconsistent lengths"),
        (pax(b"200010 a=" + b"1" * 200_000 + b"\n"), "a number in its records is too long"),
        (pax(b"11 size=-5\n") + header("a.npy", b"0", b"0"), "has -5 bytes"),
        (pax(b"29 size=99999999999999999999\n") + header("a.npy", b"0", b"0"), "truncated"),
        (pax(b"0 a=b\n"), "have inconsistent lengths"),
        (pax(b"19 GNU.sparse.a=1.\n") + header("a.npy", b"0", b"0"), "sparse"),
        (header("a.npy", b"S", b"0"), "unsupported type"),
        (header("a.npy", b"Z", b"0"), "unsupported type"),
    ],
)
def test_a_malicious_header_is_refused_at_once(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(data + bytes(10240))
    refused(tmp_path / "x.tar", said)


def test_a_parquet_file_of_constant_rows_is_refused_by_what_they_would_take(tmp_path: Path) -> None:
    """2 kB whose rows are 20 million zeros each, as an encoding of runs keeps them."""
    row = pa.array(np.zeros(20_000_000, np.float32))
    offsets = pa.array(np.arange(3) * 20_000_000, pa.int32())
    column = pa.ListArray.from_arrays(offsets, pa.concat_arrays([row] * 2))
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"input": column}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    refused(path, "would unpack to .* but 134217728 are allowed")


def varint(number: int) -> bytes:
    """A whole number as Thrift's compact protocol writes it."""
    left, found = 2 * number, b""
    while left > 127:
        left, found = left >> 7, found + bytes([left & 127 | 128])
    return found + bytes([left])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("what", ["bytes", "values", "place"])
def test_a_page_that_declares_more_than_the_footer_is_refused(
    what: str, version: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.parquet"
    options = {"use_dictionary": False, "compression": "none", "data_page_version": version}
    parquet.write_table(pa.table({"input": X[:, 0, 0]}), path, **options)
    assert list(row_groups(path))
    column = parquet.read_metadata(path).row_group(0).column(0)
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    size = varint(column.total_uncompressed_size)
    sizes = re.search(rb"\x15.\x15(..)\x15\1", data, re.DOTALL)  # a page's, as it is and unpacked
    assert sizes is not None
    old, new, within = {
        "bytes": (b"\x16" + size, b"\x16" + varint(200), (start, len(data))),
        "values": (b"\x15" + varint(70), b"\x15" + varint(71), (0, start)),
        "place": (sizes[0], sizes[0][:-2] + varint(8000), (0, start)),  # into what follows it
    }[what]
    at = data.index(old, *within)
    path.write_bytes(data[:at] + new + data[at + len(old) :])
    refused(path, "a page declares more than the footer")


def test_a_parquet_file_of_one_long_text_is_read_row_by_row(tmp_path: Path) -> None:
    column = pa.array([b"x" * (5 << 20)] * 26, pa.binary()).dictionary_encode()
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"bytes": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    assert _parquet_batch(path, "x") < 32
    refused(path, "not an array of inputs")


def test_the_footer_is_read_as_pyarrow_reads_it(tmp_path: Path) -> None:
    table = {"input": X.tolist(), "half": X[:, 0, 0], "label": Y, "name": [str(i) for i in Y]}
    parquet.write_table(pa.table(table), tmp_path / "x.parquet", row_group_size=30)
    metadata = parquet.read_metadata(tmp_path / "x.parquet")
    found = list(row_groups(tmp_path / "x.parquet"))
    assert len(found) == metadata.num_row_groups == 3
    widths = {"DOUBLE": 8, "FLOAT": 4, "INT64": 8, "BYTE_ARRAY": 1}
    for i, each in enumerate(found):
        group = metadata.row_group(i)
        columns = [group.column(c) for c in range(4)]
        values = sum(c.num_values * widths[c.physical_type] for c in columns)
        pages = sum(c.total_uncompressed_size for c in columns)
        assert each.rows == group.num_rows
        assert each.value_bytes == max(values, pages)
        assert each.text_bytes == columns[3].total_uncompressed_size
