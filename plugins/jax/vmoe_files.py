"""Reads google-research/vmoe checkpoints without JAX: an index and its shards.

`PREFIX.index` is a tree of arrays, each with its shape, its type and its division into chunks;
`PREFIX.data-00000-of-00002` contains chunks. Both are MessagePack with extension types, which
contain MessagePack themselves. Shards refer to arrays by number: the position in the tree with its
keys sorted as strings, so `encoderblock_10` comes before `encoderblock_2`.

Before anything is allocated, the sizes in a shard are compared with the index, and those in the
index with the sizes of the files. Shards are mapped one at a time, and their chunks are copied.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np
import torch
from msgspec import Meta, Raw
from torch import Tensor

from ...common.documents import MAX_LEVELS
from ...common.files import Reading, Watched
from ...errors import CheckpointError
from ...exporter.checkpoints.floats import uninitialised

T = TypeVar("T")

INDEX = ".index"
INDEX_BYTES = 32 << 20
"""The largest size of an index; an array takes about a hundred bytes, a chunk about forty."""

VERSION = "20220622"
"""The version in an index; an index written before 24 June 2022 has none."""

SHARD_KEY = "__msgpack_array_chunk_a87ca2__"
"""The key that identifies a shard."""

ARRAY, SLICE_ND, INDEX_INFO = 1, 6, 8
"""Codes of extension types."""

MAX_AXES, MAX_CHUNKS, MAX_SHARDS, MAX_PARTS = 8, 1 << 14, 99_999, 1 << 10

WITHOUT_SHARDS = 1 << 26
"""The largest number of elements of an array if no shard confirms it, except for experts."""

DTYPES = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "float64": np.dtype("<f8"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

TRAIN_STATE = ("step", "params", "opt_state", "rngs")
"""Fields of a train state, in the order in which their arrays are numbered without a version."""

TRUNCATED = "copy or download the file again; it was probably truncated"

Slices = tuple[tuple[int, int], ...]
"""The position of a chunk in its array: start and stop on each axis."""

_Size = Annotated[int, Meta(ge=0, le=2**40)]
_Shape = Annotated[list[_Size], Meta(max_length=MAX_AXES)]
_Shards = Annotated[list[_Size], Meta(max_length=MAX_CHUNKS)]
_Positions = Annotated[list[bytes], Meta(max_length=MAX_CHUNKS)]

_MAP = msgspec.msgpack.Decoder(dict[str, Raw])
_TEXT = msgspec.msgpack.Decoder(str)
_COUNT = msgspec.msgpack.Decoder(Annotated[int, Meta(ge=1, le=MAX_SHARDS)])
_EXTENSION = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_INFO = msgspec.msgpack.Decoder(tuple[bytes, _Positions, _Shards])
_SHAPED = msgspec.msgpack.Decoder(tuple[_Shape, str, Raw, Raw])
_AXES = msgspec.msgpack.Decoder(Annotated[list[bytes], Meta(max_length=MAX_AXES)])
_AXIS = msgspec.msgpack.Decoder(tuple[_Size, _Size, None])
_NDARRAY = msgspec.msgpack.Decoder(tuple[_Shape, str, memoryview])


@dataclass(frozen=True, slots=True)
class IndexedArray:
    """An array in an index: its number, and the position and shard of each of its chunks."""

    key: str
    number: int
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[Slices, int], ...]


@dataclass(frozen=True, slots=True)
class VmoeIndex:
    """The contents of an index: the network's arrays, the shards, and a description of both.

    `counts` has the number of all arrays in each shard.
    """

    file: Path
    shards: tuple[Path, ...]
    arrays: tuple[IndexedArray, ...]
    counts: Counter[int]
    note: str

    @property
    def files(self) -> tuple[Path, ...]:
        """The index and its existing shards."""
        return (self.file, *(shard for shard in self.shards if shard.is_file()))

    def zeros(self) -> dict[str, Tensor]:
        """Returns a tensor of each array's shape that occupies no memory; reads no shard.

        Raises CheckpointError for a large array if no shards confirm its size.
        """
        if len(self.files) > len(self.shards):
            _check_sizes(self)
        else:
            for array in self.arrays:
                numbers = math.prod(array.shape)
                if numbers > WITHOUT_SHARDS and "/Moe/Mlp/" not in array.key:
                    raise CheckpointError(
                        f"{self.file}: {array.key} of shape {list(array.shape)} is too large to "
                        "be accepted without its shards"
                    )
        return {array.key: torch.zeros(()).expand(array.shape) for array in self.arrays}

    def read(self, watched: Watched | None) -> tuple[dict[str, Tensor], Path | None]:
        """Returns the arrays as float32, and the temporary file they are mapped from, if any.

        Raises CheckpointError if a shard is missing, cut short, or does not match the index.
        """
        missing = [shard.name for shard in self.shards if shard not in self.files]
        if missing:
            raise CheckpointError(
                f"{self.file}: {len(missing)} of {len(self.shards)} shards are missing: "
                f"{', '.join(missing[:6])}",
                hint=f"put them into {self.file.parent}",
            )
        _check_sizes(self)
        tensors, mapped = uninitialised({array.key: array.shape for array in self.arrays})
        reading = Reading(self.shards if mapped is None else (*self.shards, mapped), watched)
        for number, shard in enumerate(self.shards):
            _read_shard(self, number, shard, tensors, reading)
            reading.end()
        return tensors, mapped


# --- the index ---------------------------------------------------------------------------------


def read_index(file: Path) -> VmoeIndex:
    """Reads an index; raises CheckpointError for an invalid one."""
    with file.open("rb") as opened:
        data = opened.read(INDEX_BYTES + 1)
    if len(data) > INDEX_BYTES:
        raise CheckpointError(f"{file} has more than {INDEX_BYTES} bytes, the limit for an index")
    top = _decoded(file, data, _MAP)
    if not {"shard_count", "index"} <= top.keys():
        raise CheckpointError(
            f"{file} is not an index of google-research/vmoe: it has {', '.join(top)[:200]}",
            hint="it must have shard_count, index and version",
        )
    version = _decoded(file, top["version"], _TEXT) if "version" in top else None
    if version not in (None, VERSION):
        raise CheckpointError(
            f"{file}: its version is {str(version)[:40]!r}, but only {VERSION} is supported",
            hint="the layout may have changed: use a newer version of moexport",
        )
    count = _decoded(file, top["shard_count"], _COUNT)
    prefix = file.name.removesuffix(INDEX)
    shards = tuple(
        file.with_name(f"{prefix}.data-{shard:05d}-of-{count:05d}") for shard in range(count)
    )
    leaves = list(_leaves(file, top["index"]))
    roots = {path[0] for path, _ in leaves if path}
    state = "params" in roots
    if not state and "opt_state" in roots:
        raise CheckpointError(
            f"{file} is a train state without params: it has {', '.join(sorted(roots))[:200]}",
            hint="pass the checkpoint that has the network's parameters",
        )
    if version is None and state:
        leaves = _sort_by_field(file, leaves, roots)
    arrays = [_array(file, path, number, leaf, count) for number, (path, leaf) in enumerate(leaves)]
    counts = Counter(shard for array in arrays for shard in {shard for _, shard in array.chunks})
    network = tuple(
        replace(array, key=array.key.removeprefix("params/"))
        for array in arrays
        if not state or array.key.startswith("params/")
    )
    if not network:
        raise CheckpointError(f"{file} lists no weights")
    for array in network:
        if array.dtype not in DTYPES:
            raise CheckpointError(f"{file}: {array.key} has dtype {array.dtype}, expected a float")
        _check_covered(file, array)
    return VmoeIndex(
        file, shards, network, counts, _note(prefix, network, len(arrays), count, state=state)
    )


def _note(
    prefix: str, network: tuple[IndexedArray, ...], total: int, shards: int, *, state: bool
) -> str:
    step = re.fullmatch(r".*_(\d+)", prefix)
    contents = f"train state, {total} arrays" if state else "parameters"
    types = ", ".join(sorted({array.dtype for array in network}))
    numbers = sum(math.prod(array.shape) for array in network)
    return (
        f"google-research/vmoe checkpoint: {contents}, "
        + (f"step {step[1]} by its name, " if step and state else "")
        + f"{len(network)} arrays of the network with {numbers} numbers as {types}, in {shards} "
        + f"shard{'s' * (shards > 1)}"
    )


def _leaves(
    file: Path, node: Raw, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Raw]]:
    """Yields the arrays of a tree, with keys sorted as strings; skips nil and empty maps."""
    if len(path) > MAX_LEVELS:
        raise CheckpointError(f"{file}: maps are nested more than {MAX_LEVELS} levels deep")
    first = bytes(memoryview(node)[:1])
    if first == b"\xc0":
        return
    if 0x80 <= first[0] <= 0x8F or first in (b"\xde", b"\xdf"):
        for key, inner in sorted(_decoded(file, node, _MAP).items()):
            yield from _leaves(file, inner, (*path, key))
        return
    yield path, node


def _sort_by_field(
    file: Path, leaves: list[tuple[tuple[str, ...], Raw]], roots: set[str]
) -> list[tuple[tuple[str, ...], Raw]]:
    """Sorts the arrays of a train state in the order of files without a version."""
    if not roots <= set(TRAIN_STATE):
        raise CheckpointError(
            f"{file}: the order of the arrays in its shards is unknown, because it has no version "
            f"and contains {', '.join(sorted(roots))[:200]}",
            hint="save only the parameters, or restore and save the state with vmoe's code from "
            "after June 2022",
        )
    return sorted(leaves, key=lambda leaf: TRAIN_STATE.index(leaf[0][0]))


def _array(file: Path, path: tuple[str, ...], number: int, leaf: Raw, count: int) -> IndexedArray:
    """Reads an array of the index from its extension type."""
    key = "/".join(path)
    info = _decoded(file, leaf, _EXTENSION)
    if info.code != INDEX_INFO:
        raise CheckpointError(f"{file}: {key[:200]} is of type {info.code}, not {INDEX_INFO}")
    shaped, slices, shards = _decoded(file, info.data, _INFO)
    shape, dtype, _, _ = _decoded(file, shaped, _SHAPED)
    if len(slices) != len(shards) or any(shard >= count for shard in shards):
        raise CheckpointError(f"{file}: {key[:200]} refers to shards that do not exist")
    chunks = zip((_slices(file, axes) for axes in slices), shards, strict=True)
    return IndexedArray(key, number, tuple(shape), dtype[:40], tuple(chunks))


def _slices(file: Path, data: bytes | memoryview) -> Slices:
    """Decodes the position of a chunk."""
    ranges = (_decoded(file, axis, _AXIS) for axis in _decoded(file, data, _AXES))
    return tuple((start, stop) for start, stop, _ in ranges)


MAX_CELLS = 1 << 16


def _check_covered(file: Path, array: IndexedArray) -> None:
    """Raises CheckpointError unless the chunks cover every element of the array once."""
    shape = array.shape
    what = f"{file}: the chunks of {array.key} of shape {list(shape)}"
    for slices, _ in array.chunks:
        inside = all(0 <= a < b <= size for (a, b), size in zip(slices, shape, strict=False))
        if len(slices) != len(shape) or not inside:
            raise CheckpointError(f"{what} extend beyond the array: {_format(slices)}")
    # Chunk boundaries cut the array into cells; a chunk covers a cell completely or not at all.
    edges = [
        sorted({0, size, *(edge for slices, _ in array.chunks for edge in slices[axis])})
        for axis, size in enumerate(shape)
    ]
    cells = [len(cuts) - 1 for cuts in edges]
    if math.prod(cells) > MAX_CELLS:
        raise CheckpointError(f"{what} divide it into more than {MAX_CELLS} cells")
    cells_at = [{edge: cell for cell, edge in enumerate(cuts)} for cuts in edges]
    filled = np.zeros(cells, dtype=bool)
    for slices, _ in array.chunks:
        box = tuple(slice(at[a], at[b]) for at, (a, b) in zip(cells_at, slices, strict=True))
        if filled[box].any():
            raise CheckpointError(f"{what} overlap at {_format(slices)}")
        filled[box] = True
    if not filled.all():
        raise CheckpointError(f"{what} leave gaps", hint=TRUNCATED)


def _format(slices: Slices) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in slices) + "]"


def _volume(slices: Slices) -> int:
    return math.prod(stop - start for start, stop in slices)


# --- the shards --------------------------------------------------------------------------------


def _check_sizes(index: VmoeIndex) -> None:
    """Raises CheckpointError for a shard that is shorter than its arrays."""
    expected_bytes = Counter[int]()
    for array in index.arrays:
        for slices, shard in array.chunks:
            expected_bytes[shard] += DTYPES[array.dtype].itemsize * _volume(slices)
    for number, file in enumerate(index.shards):
        size = file.stat().st_size
        if size < expected_bytes[number]:
            raise CheckpointError(
                f"{file} has {size} bytes, but its index places {expected_bytes[number]} in it",
                hint=TRUNCATED,
            )


def _read_shard(
    index: VmoeIndex, number: int, shard: Path, tensors: Mapping[str, Tensor], reading: Reading
) -> None:
    """Copies a shard's chunks of the network into its tensors."""
    if shard.stat().st_size == 0:
        raise CheckpointError(f"{shard}: the file is empty", hint=TRUNCATED)
    # The file stays mapped as long as anything refers to the view.
    view = np.memmap(shard, mode="r").data
    _check_count(shard, view, index.counts[number])
    arrays = _decoded(shard, view, _MAP)
    if SHARD_KEY not in arrays:
        raise CheckpointError(f"{shard} is not a shard of google-research/vmoe")
    for array in index.arrays:
        expected = {slices for slices, shard_number in array.chunks if shard_number == number}
        if expected:
            raw = arrays.get(str(array.number))
            _copy_array(shard, array, expected, raw, tensors[array.key].numpy(), reading)


def _check_count(shard: Path, view: memoryview, arrays: int) -> None:
    """Raises CheckpointError for a shard whose number of arrays differs from the index.

    A file with a million arrays is refused after its first bytes.
    """
    first = view[0]
    if 0x80 <= first <= 0x8F:
        count = first & 0x0F
    elif first in (0xDE, 0xDF):
        count = int.from_bytes(view[1 : 3 if first == 0xDE else 5], "big")
    else:
        raise CheckpointError(f"{shard} is not a shard of google-research/vmoe")
    if count != arrays + 1:
        raise CheckpointError(
            f"{shard} has {count - 1} arrays, but its index places {arrays} in it",
            hint="use the index and shards of one checkpoint",
        )


class _ChunkPosition:
    """The position of a chunk in its array, as the decoder returns it."""

    def __init__(self, slices: Slices) -> None:
        self.slices = slices


_Parts = Annotated[list[np.ndarray], Meta(max_length=MAX_PARTS)]  # flat pieces of a chunk
_Chunks = Annotated[list[tuple[_Parts, _ChunkPosition]], Meta(max_length=MAX_CHUNKS)]


def _copy_array(
    shard: Path,
    array: IndexedArray,
    expected: set[Slices],
    raw: Raw | None,
    target: np.ndarray,
    reading: Reading,
) -> None:
    """Copies the chunks of one array to their positions."""

    def hook(code: int, data: memoryview) -> Any:
        if code == SLICE_ND:
            return _ChunkPosition(_slices(shard, data))
        if code != ARRAY:
            raise CheckpointError(f"{shard}: {array.key} has a value of type {code}")
        shape, dtype, raw = _decoded(shard, data, _NDARRAY)
        if dtype != array.dtype or len(raw) != math.prod(shape) * DTYPES[array.dtype].itemsize:
            raise CheckpointError(
                f"{shard}: {array.key} has a piece of {len(raw)} bytes, declared as {dtype[:40]} "
                f"{shape}, but its dtype in the index is {array.dtype}"
            )
        return np.frombuffer(raw, DTYPES[array.dtype])

    decoder = msgspec.msgpack.Decoder(_Chunks, ext_hook=hook)
    chunks = [] if raw is None else _decoded(shard, raw, decoder)
    found = [position.slices for _, position in chunks]
    if len(found) != len(expected) or set(found) != expected:
        raise CheckpointError(
            f"{shard} has {array.key} at {', '.join(map(_format, found[:4])) or 'no position'}, "
            f"but its index has it at {', '.join(map(_format, sorted(expected)[:4]))}",
            hint="use the index and shards of one checkpoint",
        )
    for parts, position in chunks:
        _copy_chunk(shard, array, parts, position.slices, target, reading)


def _copy_chunk(
    shard: Path,
    array: IndexedArray,
    parts: list[np.ndarray],
    slices: Slices,
    target: np.ndarray,
    reading: Reading,
) -> None:
    """Copies one chunk, whose pieces are in C order."""
    numbers = sum(len(part) for part in parts)
    if numbers != _volume(slices):
        raise CheckpointError(
            f"{shard}: the chunk {_format(slices)} of {array.key} has {numbers} numbers, expected "
            f"{_volume(slices)}",
            hint=TRUNCATED,
        )
    values = parts[0] if len(parts) == 1 else np.concatenate(parts)
    box = tuple(slice(start, stop) for start, stop in slices)
    target[box] = values.reshape([stop - start for start, stop in slices])
    reading.advance(values.nbytes + 4 * numbers)


def _decoded(file: Path, data: Any, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decodes MessagePack bytes; raises CheckpointError if they are not of the decoder's type."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise CheckpointError(
            f"{file} is damaged or is not a file of google-research/vmoe ({reason})", hint=TRUNCATED
        ) from error
