"""Every kind of feed gives the same inputs, and every bad one says what is wrong with it."""

from __future__ import annotations

import copy
import importlib
import io
import json
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.data.feeds import batches, count, named_batches
from moexport.errors import FeedError
from moexport.tests.calibration.reading import labelled_batches, samples
from moexport.tests.command import run
from moexport.tests.recorded import DATA

X = np.random.default_rng(0).standard_normal((6, 5, 32)).astype(np.float32)
WEIGHTS = DATA / "soft_moe_lucidrains" / "weights.pt"

MODULE = """
import numpy as np, torch
x = np.random.default_rng(0).standard_normal((6, 5, 32)).astype(np.float32)
array_list = [x[:2], x[2:]]
def generator():
    yield x[:1]
    yield torch.from_numpy(x[1:])
def dicts():
    yield {"input": x, "label": 3}
def pairs():
    yield x, np.zeros(6)
nothing = []
number = 5
def broken():
    raise RuntimeError("the data set is not mounted")
def wrong():
    yield {"image": x}
def words():
    yield "a word"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's own in the current folder."""
    (tmp_path / "own_feeds.py").write_text(MODULE)
    (tmp_path / "own_broken.py").write_text("raise ValueError('no such dataset')")
    monkeypatch.chdir(tmp_path)
    yield "own_feeds"
    for name in ("own_feeds", "own_broken", "own_package", "own_package.feeds"):
        sys.modules.pop(name, None)


def folder_of(tmp_path: Path) -> Path:
    (tmp_path / "feed").mkdir()
    np.save(tmp_path / "feed" / "b.npy", X[4:])
    np.save(tmp_path / "feed" / "a.npy", X[:4])
    return tmp_path / "feed"


def npz_of(tmp_path: Path, **arrays: np.ndarray) -> Path:
    np.savez(tmp_path / "x.npz", allow_pickle=True, **arrays)
    return tmp_path / "x.npz"


def one_npy(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", X)
    return tmp_path / "x.npy"


KINDS: dict[str, Callable[[Path], Any]] = {
    "npz": lambda p: npz_of(p, input=X, label=np.arange(6)),
    "npz of one array": lambda p: npz_of(p, anything=X),
    "path as text": lambda p: str(npz_of(p, input=X)),
    "npy": one_npy,
    "folder": folder_of,
    "array": lambda _: X,
    "list": lambda _: [X[:3], X[3:]],
    "generator": lambda _: (X[i : i + 1] for i in range(6)),
    "tensors": lambda _: [torch.from_numpy(X)],
    "pairs": lambda _: [(X, np.zeros(6))],
    "dicts": lambda _: [{"input": X}],
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_feed_gives_the_inputs_in_order(kind: str, tmp_path: Path) -> None:
    feed = KINDS[kind](tmp_path)
    assert np.array_equal(samples(feed, "input", 100), X)


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_more_is_taken_than_was_asked_for(kind: str, tmp_path: Path) -> None:
    feed = KINDS[kind](tmp_path)
    assert np.array_equal(samples(feed, "input", 4), X[:4])


@pytest.mark.parametrize("name", ["array_list", "generator", "dicts", "pairs"])
def test_an_iterable_of_the_users_module_is_a_feed(name: str, module: str) -> None:
    assert np.array_equal(samples(f"{module}:{name}", "input", 100), X)


def test_the_module_may_lie_in_a_package(module: str, tmp_path: Path) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "feeds.py").write_text(
        MODULE + "class Split:\n    test = array_list"
    )
    for name in ("pairs", "Split.test"):
        feed = f"own_package.feeds:{name}"
        assert np.array_equal(samples(feed, "input", 100), X)
        pairs = list(labelled_batches(feed, "input"))
        assert [labels is None for _, labels in pairs] == [name != "pairs"] * len(pairs)


def test_an_endless_feed_is_read_as_far_as_needed() -> None:
    taken: list[int] = []

    def endless() -> Iterator[np.ndarray]:
        while True:
            taken.append(1)
            yield X[:1]

    assert samples(endless(), "input", 3).shape == (3, 5, 32)
    assert len(taken) == 3


def bad(tmp_path: Path, kind: str) -> str | Path:
    """A feed that is wrong in one way."""
    files: dict[str, Callable[[Path], object]] = {
        "text.npz": lambda path: path.write_text("not an archive"),
        "cut.npz": lambda path: path.write_bytes(npz_of(tmp_path, input=X).read_bytes()[:300]),
        "array.npz": lambda path: np.save(path.open("wb"), X),
        "empty.npz": np.savez,
        "other.npz": lambda path: np.savez(path, image=X, mask=X, label=np.arange(6)),
        "objects.npz": lambda path: np.savez(path, input=np.array([{}], dtype=object)),
        "scalar.npz": lambda path: np.savez(path, input=np.float32(3)),
        "text.npy": lambda path: path.write_text("not an array"),
        "scalar.npy": lambda path: np.save(path, np.float32(3)),
        "archive.npy": lambda path: path.write_bytes(npz_of(tmp_path, input=X).read_bytes()),
        "objects.npy": lambda path: np.save(path, np.array([{}], dtype=object)),
        "empty.npy": lambda path: np.save(path, X[:0]),
        "table.csv": lambda path: path.write_text("1,2,3"),
        "folder": lambda path: path.mkdir(),
        "words.npz": lambda path: np.savez(path, input=np.array(["a", "b"])),
    }
    files[kind](tmp_path / kind)
    return tmp_path / kind


FILES = {
    "text.npz": "not a readable .npz file",
    "cut.npz": "not a readable .npz file",
    "array.npz": "not a readable .npz file",
    "empty.npz": "contains nothing, but no array 'input'",
    "other.npz": "contains image, mask, label, but no array 'input'",
    "objects.npz": "objects.npz contains Python objects (dtype object)",
    "scalar.npz": "not an array of inputs",
    "text.npy": "not a readable .npy file",
    "scalar.npy": "not an array of inputs",
    "archive.npy": "not a readable .npy file",
    "objects.npy": "objects.npy contains Python objects (dtype object)",
    "empty.npy": "the feed contains no inputs",
    "table.csv": "not a readable .npy file",
    "folder": "the folder contains no .npy file",
    "words.npz": "not an array of inputs",
}


@pytest.mark.parametrize("kind", list(FILES))
def test_a_file_that_is_no_feed_says_so(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FeedError) as caught:
        samples(bad(tmp_path, kind), "input", 4)
    assert FILES[kind] in caught.value.message


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ("nowhere.npz", "no such feed"),
        ("nowhere", "no such feed"),
        ("", "contains no .npy file"),
        ("no_such_module:x", "cannot be imported"),
        ("own_feeds:missing", "cannot be imported"),
        ("own_feeds:", "no such feed"),
        (":x", "no such feed"),
        ("own_broken:x", "cannot be imported (no such dataset)"),
        ("own_feeds:nothing", "the feed contains no inputs"),
        ("own_feeds:number", "is of type int, not an iterable"),
        ("own_feeds:broken", "the data set is not mounted"),
        ("own_feeds:wrong", "yields a dict without 'input'"),
        ("own_feeds:words", "yields str, not an array of inputs"),
    ],
)
def test_a_name_that_is_no_feed_says_so(feed: str, message: str, module: str) -> None:
    assert module
    with pytest.raises(FeedError) as caught:
        samples(feed, "input", 4)
    assert message in caught.value.message


@pytest.mark.parametrize("items", [[], [X[:0]], [5], [None], [[]], [{}], ["x"]])
def test_an_iterable_without_inputs_says_so(items: list[Any]) -> None:
    with pytest.raises(FeedError):
        samples(items, "input", 4)


def test_batches_of_several_sizes_give_those_that_stack() -> None:
    feed = [X[:2], X[2:4, :3], X[4:]]
    assert np.array_equal(samples(feed, "input", 6), np.concatenate([X[:2], X[4:]]))
    assert [len(batch) for batch in batches(feed, "input")] == [2, 2, 2]


def exported(tmp_path: Path, feed: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "out"
    outcome = run("export", WEIGHTS, "-o", out, "--data", feed, "--k", "2", *options)
    assert outcome.code == 0, outcome.err
    content: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return content


def test_parity_is_checked_on_the_inputs_that_were_given(tmp_path: Path) -> None:
    manifest = exported(tmp_path, npz_of(tmp_path, input=X.astype(np.float64)))
    assert manifest["parity"]["samples"] == 6
    assert not any("random" in note for note in manifest["notes"])
    with np.load(tmp_path / "out" / "parity.npz") as reference:
        assert np.array_equal(reference["x"], X)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (
            X[:, :, :31],
            (),
            "--data: input 'input' needs float32 (batch, tokens, 32), not float32 (6, 5, 31)",
        ),
        (X[0], (), "needs float32 (batch, tokens, 32), not float32 (5, 32)"),
        (X, ("--tokens", "7"), "needs float32 (batch, 7, 32), not float32 (6, 5, 32)"),
        (X[:, :0], (), "--data: input 'input' is empty: (6, 0, 32)"),
        (X, ("--batch", "8"), "--batch 8 needs that many inputs, but the feed has 6"),
        (np.full_like(X, np.nan), (), "input 'input' contains NaN or Inf"),
        (np.full_like(X, -np.inf), (), "input 'input' contains NaN or Inf"),
        (X.astype(np.complex64), (), "contains complex64 (6, 5, 32), not an array of inputs"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused(
    x: np.ndarray, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    feed = npz_of(tmp_path, input=x)
    outcome = run("export", WEIGHTS, "-o", out, "--data", feed, *options)
    assert (outcome.code, outcome.out) == (1, "")
    assert message in outcome.error
    assert not out.exists()


def test_python_takes_a_generator_for_data(tmp_path: Path) -> None:
    model = moexport.load(WEIGHTS)
    bundle = moexport.export(model, tmp_path / "out", k=2, data=(x[None] for x in X))
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity["samples"] == 6


def bomb(path: Path, kind: int, copies: int) -> None:
    """Writes an archive whose arrays of zeros have 32 MB each, and in the file next to nothing."""
    content = io.BytesIO()
    np.save(content, np.zeros((8, 1 << 20), np.float32))
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("input.npy", content.getvalue())
        for i in range(1, copies):
            info = copy.copy(archive.getinfo("input.npy"))  # the same bytes under another name
            info.filename = f"other{i}.npy"
            archive.filelist.append(info)
            archive.NameToInfo[info.filename] = info


@pytest.mark.parametrize(
    ("kind", "copies", "said"),
    [
        pytest.param(zipfile.ZIP_DEFLATED, 100, "would unpack to", id="overlapping"),
        pytest.param(zipfile.ZIP_BZIP2, 1, "unsupported compression of", id="bzip2"),
        pytest.param(zipfile.ZIP_LZMA, 1, "unsupported compression of", id="lzma"),
    ],
)
def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused_unread(
    kind: int, copies: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.npz"
    bomb(path, kind, copies)
    for read in (batches, labelled_batches):
        started = time.process_time()
        with pytest.raises(FeedError, match=said) as caught:
            list(read(path, "input"))
        assert time.process_time() - started < 1
        assert str(path) in caught.value.message


def test_archives_that_were_joined_are_refused(tmp_path: Path) -> None:
    """Python reads the last of them, and nothing of the others."""
    path = npz_of(tmp_path, input=X)
    whole = path.read_bytes()
    for data, said in (
        (whole + whole, "does not begin at the start"),
        (b"text" + whole, "does not begin at the start"),
        (whole + b"text", "ends before the file does"),
    ):
        path.write_bytes(data)
        with pytest.raises(FeedError, match=said) as caught:
            samples(path, "input", 9)
        assert str(path) in caught.value.message


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_data_after_an_array_is_an_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    content = io.BytesIO()
    np.save(content, X)
    np.save(content, X)
    if kind == "npy":
        path.write_bytes(content.getvalue())
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("input.npy", content.getvalue())
    with pytest.raises(FeedError, match="3968 bytes follow the array"):
        samples(path, "input", 9)


def test_an_array_of_more_rows_than_its_file_has_bytes_is_refused(tmp_path: Path) -> None:
    """Of rows without numbers a file could hold any number, and each would be looked at."""
    np.save(tmp_path / "x.npy", np.empty((2**31 - 1, 0), np.float32))
    with pytest.raises(FeedError, match="array of 2147483647 rows"):
        list(batches(tmp_path / "x.npy", "input"))


def test_a_header_that_nests_too_deep_is_no_lack_of_memory(tmp_path: Path) -> None:
    header = b"-" * 7000 + b"1\n"
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    with pytest.raises(FeedError, match="its header is nested too deeply"):
        list(batches(path, "input"))


@pytest.mark.parametrize("name", ["input", "x"])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_a_dict_of_arrays_is_a_feed_as_its_archive_is(
    name: str, kind: Callable[[np.ndarray], Any], tmp_path: Path
) -> None:
    labels = np.arange(6)
    np.savez(tmp_path / "data.npz", **{name: X, "label": labels})  # type: ignore[arg-type]
    given = {name: kind(X), "label": kind(labels)}
    for feed in (tmp_path / "data.npz", given):
        (pair,) = labelled_batches(feed, "input")
        np.testing.assert_array_equal(pair[0], X)
        np.testing.assert_array_equal(pair[1], labels)
    assert count(given, "input") == 6
    np.testing.assert_array_equal(samples(given, "input", 4), X[:4])
    assert [*next(named_batches(given, ["input"]))] == ["input"]


def test_an_input_may_be_called_label(tmp_path: Path) -> None:
    fields = {"x": X, "label": np.arange(6.0)}
    np.savez(tmp_path / "data.npz", **fields)  # type: ignore[arg-type]
    for feed in (tmp_path / "data.npz", fields, [fields]):
        (found,) = named_batches(feed, ["x", "label"])
        assert {*found} == {"x", "label"}
        np.testing.assert_array_equal(found["label"], fields["label"])


class Cursor:
    """An iterator of batches that the user's code keeps open."""

    def __init__(self) -> None:
        self.left, self.closed = [X, X], False

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> np.ndarray:
        if self.closed or not self.left:
            raise StopIteration
        return self.left.pop()

    def close(self) -> None:
        self.closed = True


def test_an_iterator_of_the_user_s_code_is_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_cursor.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = importlib.import_module("own_cursor")
    monkeypatch.setattr(own, "feed", Cursor(), raising=False)
    assert len(samples("own_cursor:feed", "input", 2)) == 2
    assert len(samples("own_cursor:feed", "input", 2)) == 2


def test_a_tensor_is_a_batch_and_not_a_row_each() -> None:
    given = torch.from_numpy(X).requires_grad_()
    (batch,) = batches(given, "input")
    np.testing.assert_array_equal(batch, X)
    (half,) = batches(given.bfloat16(), "input")
    assert half.shape == X.shape and half.dtype == np.float32


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "the dict has no items, but no 'input'"),
        ({"a": X, "b": X}, "the dict has a, b, but no 'input'"),
        ({"input": "words"}, "not an array of inputs"),
        ({"input": X, "label": np.zeros(5, int)}, "'label'"),
    ],
)
def test_a_dict_that_is_no_feed_says_what_is_wrong(given: Any, words: str) -> None:
    with pytest.raises(FeedError, match=words):
        [*labelled_batches(given, "input")]
