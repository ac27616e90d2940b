"""Data in shards: WebDataset's tar files and Parquet, read in batches.

A feed names shards as one file, a folder of them, or a range in WebDataset's notation:
`train-{000..015}.tar`. Each of these may be a URL.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..common.documents import read_document
from ..common.files import allowed_bytes
from ..common.locations import AnyPlace, has_file, local, path_of, url_of
from ..errors import FeedError, MissingExtraError, install
from .arrays import npy_array
from .batches import IMAGE, INPUT, LABEL, Array, Fields

TAR, PARQUET = ".tar", ".parquet"
SHARD_BATCH = 32
MAX_SHARDS = 1_000_000
MAX_DIGITS = 18

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")

DAMAGED = "copy the shard again, or write it again"

UNREADABLE = (ValueError, TypeError, KeyError, IndexError, OverflowError)
"""Built-in exceptions that pyarrow raises for damaged files."""

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm"})
"""Suffixes of files that are read as images."""


def shards_of(where: object) -> list[AnyPlace] | None:
    """Returns the shards that a feed names, in order; None if it names something else.

    Raises `FeedError` for a reversed or absurdly long range.
    """
    if not isinstance(where, str | Path):
        return None
    text = url_of(where) or str(path_of(where))
    if Path(text).suffix in (TAR, PARQUET):
        span = RANGE.search(text)
        if span is None:
            return [text]
        first, last = span.groups()
        if max(len(first), len(last)) > MAX_DIGITS:
            raise FeedError(f"{text[:80]}…: shard numbers have at most {MAX_DIGITS} digits")
        if not int(first) <= int(last) < int(first) + MAX_SHARDS:
            raise FeedError(f"{text}: a range has 1 to {MAX_SHARDS} shards, the lower number first")
        numbers = range(int(first), int(last) + 1)
        before, after = text[: span.start()], text[span.end() :]
        return [f"{before}{number:0{len(first)}d}{after}" for number in numbers]
    folder = local(where)
    if not folder.is_dir():
        return None
    files = sorted(f for f in folder.iterdir() if f.suffix in (TAR, PARQUET))
    _check_complete(folder, {file.name for file in files})
    return [*files] or None


def shard_batches(shards: Sequence[AnyPlace]) -> Iterator[tuple[str, Fields]]:
    """Yields the batches of all shards in order, each with the name of its file.

    Raises a `FeedError` that names a shard if it is missing, truncated or of the wrong kind.
    """
    check_shards(shards)
    sizes: dict[str, dict[str, int]] = {}
    for shard in shards:
        path, name = local(shard), str(shard)
        if not path.is_file():
            raise _no_such_shard(name, shards)
        batches = _parquet(path, name) if path.suffix == PARQUET else _tar(path, name)
        samples = 0
        for fields in batches:
            samples += len(next(iter(fields.values()), ()))
            yield name, fields
        if not samples:
            raise FeedError(
                f"{name} contains nothing that can be read",
                hint="it needs .npy, .jpg or .cls files (tar), or columns of numbers or images",
            )
        folder = name.rpartition("/")[0] if url_of(shard) else str(path.parent)
        if folder not in sizes:
            sizes[folder] = {n: size for listed in _indexes(folder) for n, size in listed.items()}
        expected = sizes[folder].get(path.name, samples)
        if samples != expected:
            raise FeedError(
                f"{name}: {samples} samples were read, but the index next to it lists {expected}",
                hint=f"{DAMAGED}, or correct its index",
            )


INDEXES = ("sizes.json", "shardindex.json", "index.json", "_info.json")
"""Indexes with the number of samples per shard: those of OpenCLIP, of WebDataset (wids), and of
timm's data sets on Hugging Face."""

NUMBERED = re.compile(r"(.*-)(\d+)(-of-)(\d+)(\D*)")
"""Names of shards that include the number of shards, as `datasets` writes them."""


def _indexes(folder: str) -> Iterator[dict[str, int]]:
    """Yields the number of samples by shard, for each index in a folder.

    Files that have the name of an index but another format are ignored.
    """
    for name in INDEXES:
        if not has_file(folder, name):
            continue
        content = read_document(local(f"{folder}/{name}"), "json", FeedError)
        with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            if "shardlist" in content:
                listed = content["shardlist"]
                yield {entry["url"].rpartition("/")[2]: int(entry["nsamples"]) for entry in listed}
            elif "splits" in content:
                for split in content["splits"].values():
                    lengths = map(int, split["shard_lengths"])
                    yield dict(zip(split["filenames"], lengths, strict=True))
            else:
                yield {shard: int(samples) for shard, samples in content.items()}


def _check_complete(folder: Path, names: set[str]) -> None:
    """Raises FeedError if a folder lacks a shard that an index or the other names imply."""
    parts = {match.groups() for match in map(NUMBERED.fullmatch, names) if match is not None}
    series = {(start, len(number), mid, total, end) for start, number, mid, total, end in parts}
    implied: list[Collection[str]] = [
        [f"{start}{i:0{width}d}{mid}{total}{end}" for i in range(min(int(total), MAX_SHARDS))]
        for start, width, mid, total, end in series
    ]
    for group in (*implied, *(_indexes(str(folder)) if names else ())):
        missing = [name for name in group if name not in names]
        if missing and len(missing) < len(group):
            raise FeedError(
                f"{folder}: {len(missing)} of {len(group)} shards are missing: "
                f"{', '.join(missing[:6])}",
                hint="copy them there, or name the existing ones: x-{000..015}.tar",
            )


def check_shards(shards: Sequence[AnyPlace]) -> None:
    """Raises `FeedError` for a missing shard; URLs are not looked up."""
    files = (shard for shard in shards if url_of(shard) is None)
    missing = next((str(shard) for shard in files if not Path(shard).is_file()), None)
    if missing is not None:
        raise _no_such_shard(missing, shards)


def _no_such_shard(name: str, shards: Sequence[AnyPlace]) -> FeedError:
    more = f"; it is one of {len(shards)} shards" if len(shards) > 1 else ""
    return FeedError(f"{name}: no such file{more}", hint="copy the shard there")


def _tar(path: Path, name: str) -> Iterator[Fields]:
    """Yields WebDataset batches; files with the same name up to the first dot are one sample."""
    batch: list[dict[str, Any]] = []
    for sample in _samples(path, name):
        if batch and (len(batch) == SHARD_BATCH or not _same_shapes(batch[0], sample)):
            yield _stacked(batch)
            batch = []
        batch.append(sample)
    if batch:
        yield _stacked(batch)


def _samples(path: Path, name: str) -> Iterator[dict[str, Any]]:
    import tarfile  # for tar files only

    from .tar import tar_files

    key, sample = "", dict[str, Any]()
    try:
        with path.open("rb") as file:
            for member, content in tar_files(file):
                folder, _, file_name = member.rpartition("/")
                stem, _, ending = file_name.partition(".")
                if f"{folder}/{stem}" != key and sample:
                    yield sample
                    sample = {}
                key = f"{folder}/{stem}"
                sample |= _field(ending.lower(), content, f"{name}: {member}")
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:
        raise FeedError(f"{name}: not a complete tar file: {error}", hint=DAMAGED) from error
    if sample:
        yield sample


def _field(ending: str, content: IO[bytes], where: str) -> dict[str, Any]:
    """Returns the field that a sample's file contains, by its suffix; others are not read."""
    if f".{ending}" in IMAGES:
        return {IMAGE: content.read()}
    if ending == "cls":
        label = content.read().strip()
        if not (label.removeprefix(b"-").isdigit() and len(label) < 19):
            raise FeedError(f"{where}: a .cls file must contain the number of a class")
        return {LABEL: int(label)}
    if f".{ending}".endswith(".npy"):
        name = ending.removesuffix("npy").rstrip(".") or INPUT
        return {name: npy_array(content.read(), where)}
    return {}


def _same_shapes(a: dict[str, Any], b: dict[str, Any]) -> bool:
    shapes = [{n: np.shape(x) for n, x in sample.items() if n != IMAGE} for sample in (a, b)]
    return a.keys() == b.keys() and shapes[0] == shapes[1]


def _stacked(samples: list[dict[str, Any]]) -> Fields:
    return {
        name: _objects([s[name] for s in samples])
        if name == IMAGE
        else np.stack([s[name] for s in samples])
        for name in samples[0]
    }


def _objects(values: list[Any]) -> Array:
    objects = np.empty(len(values), object)
    objects[:] = values
    return objects


def _parquet(path: Path, name: str) -> Iterator[Fields]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(
            f"{name}: Parquet needs pyarrow, which is not installed", hint=install("parquet")
        ) from error
    try:
        size = path.stat().st_size
        limits = {"thrift_string_size_limit": size, "thrift_container_size_limit": size}
        rows = _parquet_batch(path, name)
        with parquet.ParquetFile(path, page_checksum_verification=True, **limits) as file:
            remaining = file.metadata.num_rows
            for batch in file.iter_batches(rows):
                remaining -= batch.num_rows
                columns = zip(batch.schema.names, batch.columns, strict=True)
                arrays = ((n, _column(column, f"{name}: column '{n}'")) for n, column in columns)
                yield {n: x for n, x in arrays if x is not None}
            if remaining:
                raise ValueError(f"its footer declares {remaining} more rows than it contains")
    except (pa.ArrowException, OSError, *UNREADABLE) as error:
        reason = str(error).partition("\n")[0]
        raise FeedError(f"{name}: truncated, or not Parquet ({reason})", hint=DAMAGED) from error


def _parquet_batch(path: Path, name: str) -> int:
    """Returns the number of rows to read at once; FeedError for implausible declared sizes.

    A constant column takes hardly any space in a file, but decoding copies its text to each row.
    """
    from .footer import row_groups  # for Parquet only

    size = path.stat().st_size
    allowed, longest = allowed_bytes(size), 1
    for index, group in enumerate(row_groups(path)):
        if max(group.value_bytes, group.rows) > allowed:
            raise FeedError(
                f"{name}: its {size} bytes would unpack to {max(group.value_bytes, group.rows)} "
                f"in row group {index}, but {allowed} are allowed",
                hint="write it in smaller row groups",
            )
        longest = max(longest, group.text_bytes)
    return max(1, min(SHARD_BATCH, allowed // longest))


def _column(column: Any, where: str) -> Array | None:
    """Returns a column's numbers [b, …], or its bytes as objects [b]; None for other columns."""
    import pyarrow as pa

    if column.null_count:
        raise FeedError(f"{where} has empty rows", hint="leave these rows out of the file")
    if isinstance(column, pa.FixedShapeTensorArray):
        tensors: Array = column.to_numpy_ndarray()
        return tensors
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.field("bytes")  # the field in which `datasets` keeps images
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return _objects(column.to_pylist())
    shape = [len(column)]
    while isinstance(column, pa.FixedSizeListArray | pa.ListArray | pa.LargeListArray):
        sizes = set(column.value_lengths().to_pylist()) or {0}
        if len(sizes) > 1:
            raise FeedError(
                f"{where} contains lists of different lengths",
                hint="the inputs in a file must have the same shape",
            )
        shape.append(sizes.pop())
        column = column.flatten()
    kinds = pa.types
    if not any(is_(column.type) for is_ in (kinds.is_integer, kinds.is_floating, kinds.is_boolean)):
        return None
    if column.null_count:
        raise FeedError(f"{where} has empty values")
    numbers: Array = column.to_numpy(zero_copy_only=False).reshape(shape)
    return numbers
