"""Reads files of weights, in every common format.

No code in a file is executed, and its size limits the cost of reading it: a file that would unpack
to far more than its size is refused first.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import pickletools
import re
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ...common.documents import read_document
from ...common.files import allowed_bytes
from ...common.locations import copy_siblings, local, no_such_checkpoint, url_of
from ...errors import CheckpointError, FeedError
from .readers import ForeignArrays, Reader, formats, found_by_readers

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*PICKLED, ".safetensors", ".npz")
INDEX = ".index.json"
INDEX_BYTES = 128 << 20
"""The largest index of shards: one with 90,000 tensors has 9 MB."""

STANDARD = ("model.safetensors", "pytorch_model.bin")
"""The names of weights in Hugging Face's libraries, in their order of preference. `config.json` is
next to them; in a Trainer's folder, so are its optimizer and arguments."""

ADAPTER = "adapter_model"
"""The name of an adapter's weights in peft, which are not a whole model."""

RESAVE = "re-save the weights alone: torch.save(model.state_dict(), …) or safetensors"
DAMAGED = "copy or download the file again; it was probably truncated"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one checkpoint: one, or the shards in an index.

    `keys` maps each shard to the keys that the index expects in it (empty for a single file);
    `config` is the `config.json` in the folder of the files. `arrays` reads the files of another
    training framework, which cannot be read one by one.
    """

    files: tuple[Path, ...]
    keys: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    config: Path | None = None
    arrays: ForeignArrays | None = None


# --- finding the files -------------------------------------------------------------------------


def local_checkpoint(source: str | os.PathLike[str]) -> Path:
    """Returns a checkpoint's path, after copying a URL and the files that belong to it."""
    location = os.fspath(source)
    path = local(location)
    if url_of(location) is not None and path.is_file():
        if path.name.endswith(INDEX):
            copy_siblings(location, ("config.json", *dict.fromkeys(_weight_map(path).values())))
        elif path.name in STANDARD:
            copy_siblings(location, ("config.json",))
        elif path.suffix.lower() not in SUFFIXES:
            for reader, found in found_by_readers(path):
                copy_siblings(location, reader.companions(found))
    return path


def find_files(source: Path) -> WeightFiles:
    """Returns the weight files at `source`: a file, an index of shards, or a folder.

    Raises CheckpointError if there are none, if a folder has several candidates, or if a shard in
    an index is missing.
    """
    if source.is_dir():
        return _find_in_folder(source)
    if not source.is_file() or not source.name.lower().endswith((*SUFFIXES, INDEX)):
        foreign = found_by_readers(source)
        if foreign:
            return _foreign(source, foreign)
    if not source.exists():
        raise no_such_checkpoint(source)
    if not source.is_file():
        raise CheckpointError(f"{source}: neither a file nor a folder", hint="check the path")
    config = _config_in(source.parent)
    if source.name.endswith(INDEX):
        return _read_index(source, config)
    if source.suffix.lower() not in SUFFIXES:
        raise CheckpointError(
            f"{source}: weights are read from {', '.join((*SUFFIXES, f'*{INDEX}', *formats()))}, "
            f"not from {source.suffix or 'a file without suffix'}"
        )
    return WeightFiles(files=(source,), config=config if source.name in STANDARD else None)


def _foreign(source: Path, found: Sequence[tuple[Reader, Path]]) -> WeightFiles:
    """Returns the files that a reader found at a path; CheckpointError if several readers did."""
    if len(found) > 1:
        listed = ", ".join(f"{path.name} ({reader.name})" for reader, path in found)
        raise CheckpointError(
            f"{source}: there are several checkpoints: {listed}",
            hint="give the path of one of them",
        )
    ((reader, path),) = found
    arrays = reader.reads(path)
    return WeightFiles(files=arrays.files, arrays=arrays)


def _config_in(folder: Path) -> Path | None:
    config = folder / "config.json"
    return config if config.is_file() else None


def _find_in_folder(folder: Path) -> WeightFiles:
    if (folder / "manifest.json").is_file() and (folder / "weights.bin").is_file():
        raise CheckpointError(
            f"{folder} is a bundle, which contains no checkpoint",
            hint=f"give the checkpoint that it was exported from: `moexport inspect {folder}` "
            "names it",
        )
    files = _standard(folder) or sorted(folder.glob(f"*{INDEX}"))
    foreign = found_by_readers(folder)
    if files and foreign:
        raise CheckpointError(
            f"{folder}: {files[0].name} and {foreign[0][1].name} could both be the weights",
            hint="give the path of one of them",
        )
    if foreign:
        return _foreign(folder, foreign)
    if not files:
        files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
        weights = [file for file in files if not is_adapter(file)]
        if files and not weights:
            raise CheckpointError(
                f"{files[0]} is an adapter, but the weights of its base model are missing",
                hint="merge it into that model: merge_and_unload() in peft, then save_pretrained()",
            )
        files = weights
    if not files:
        raise CheckpointError(
            f"{folder} contains no weights",
            hint=f"it should contain one of {', '.join((*SUFFIXES, f'*{INDEX}', *formats()))}",
        )
    if len(files) > 1:
        names = ", ".join(p.name for p in files[:6])
        raise CheckpointError(
            f"{folder}: {len(files)} files could be the weights ({names})",
            hint="give the path of one of them",
        )
    config = _config_in(folder)
    if files[0].name.endswith(INDEX):
        return _read_index(files[0], config)
    return WeightFiles(files=(files[0],), config=config)


def is_adapter(file: Path) -> bool:
    """Whether a file has peft's name for the weights of an adapter."""
    return file.stem == ADAPTER


def _standard(folder: Path) -> list[Path]:
    """Returns the file or the index that Hugging Face's libraries would read, if there is one.

    Raises CheckpointError if a folder has both: one may be from another save.
    """
    for name in STANDARD:
        file, index = folder / name, folder / f"{name}{INDEX}"
        if not index.is_file():
            if file.is_file():
                return [file]
            continue
        if file.is_file() and name not in _weight_map(index).values():
            raise CheckpointError(
                f"{folder}: {file.name} and {index.name} could both be the weights",
                hint="give the path of one of them, or remove the other",
            )
        return [index]
    return []


def _read_index(index: Path, config: Path | None) -> WeightFiles:
    """Returns the shards of a `*.index.json`, whose `weight_map` maps every key to its file."""
    weight_map = _weight_map(index)
    if not weight_map:
        raise CheckpointError(f"{index} lists no weights")
    keys: dict[str, list[str]] = {}
    for key, name in sorted(weight_map.items(), key=lambda item: item[1]):
        keys.setdefault(name, []).append(key)
    outside = [name for name in keys if Path(name).name != name or "\0" in name]
    if outside:
        raise CheckpointError(
            f"{index}: shards must be in the index's folder, not at {outside[0]!r}"
        )
    missing = [name for name in keys if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(keys)} shards are missing: {', '.join(missing[:6])}",
            hint=f"put them into {index.parent}",
        )
    shards = {index.parent / name: tuple(in_shard) for name, in_shard in keys.items()}
    return WeightFiles(files=tuple(shards), keys=shards, config=config)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = read_document(index, "json", CheckpointError, most=INDEX_BYTES)
        weight_map = content["weight_map"]
        return {str(key): str(name) for key, name in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{index}: not an index of shards: it needs {{"weight_map": {{key: file}}}}'
        ) from error


# --- the contents of the files -----------------------------------------------------------------


def read_files(weights: WeightFiles) -> Mapping[str, Any]:
    """Returns the content of the files: names to tensors, or to other saved objects.

    For `weights.arrays` only shapes are read, as tensors without memory.
    """
    if weights.arrays is not None:
        return weights.arrays.zeros()
    if not weights.keys:
        return read_file(weights.files[0])
    merged: dict[str, Any] = {}
    # The limit is on the total: each file alone may be small enough.
    _check_archives(*(path for path in weights.files if zipfile.is_zipfile(path)))
    for path in weights.files:
        shard = read_file(path)
        missing = [key for key in weights.keys[path] if key not in shard]
        if missing:
            raise CheckpointError(
                f"{path}: {len(missing)} keys that the index assigns to this shard are missing: "
                f"{', '.join(missing[:4])}"
            )
        duplicates = sorted(merged.keys() & shard.keys())
        if duplicates:
            raise CheckpointError(
                f"{path}: {duplicates[0]} is also in another shard",
                hint="the shards are from different saves: save or download the folder again",
            )
        merged.update(shard)
    return merged


def read_file(path: Path) -> Mapping[str, Any]:
    """Returns the mapping in one file; raises CheckpointError if it cannot be read."""
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path}: the file is empty", hint=DAMAGED)
    kinds: dict[str, Callable[[Path], Any]] = {".safetensors": load_file, ".npz": _read_npz}
    try:
        content = kinds.get(path.suffix.lower(), _read_pickled)(path)
    except (CheckpointError, OSError, MemoryError):
        raise  # read_checkpoint explains files that are not damaged but unreadable
    except Exception as error:  # a damaged file fails in any way: KeyError, EOFError, …
        raise _damaged(path, error) from error
    if not isinstance(content, Mapping):
        what = "single tensor" if isinstance(content, Tensor) else type(content).__name__
        raise CheckpointError(f"{path} contains a {what}, not a state dict")
    return content


def _damaged(path: Path, error: Exception) -> CheckpointError:
    text = str(error)
    first_line = text.partition("\n")[0][:200]
    if "TorchScript" in text:
        return CheckpointError(f"{path} is a TorchScript archive, not weights", hint=RESAVE)
    if "not enough memory" in text or "can't allocate memory" in text:
        return CheckpointError(
            f"{path}: not enough memory to read it", hint="use a machine with more memory"
        )
    reason = first_line if " " in first_line else type(error).__name__
    if "central directory" in text:
        reason = "the end of the zip archive is missing"
    return CheckpointError(
        f"{path}: damaged, or not a {path.suffix.lower()} file ({reason})", hint=DAMAGED
    )


def _check_archives(*paths: Path) -> None:
    """Raises CheckpointError for zip archives that would unpack to far more than their size."""
    size, unpacked = 0, 0
    for path in paths:
        size += path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            unpacked += sum(entry.file_size for entry in archive.infolist())
    if unpacked > allowed_bytes(size):
        where = paths[0] if len(paths) == 1 else f"{paths[0].parent}: {len(paths)} shards"
        raise CheckpointError(
            f"{where}: its {size} bytes would unpack to {unpacked}", hint="save it uncompressed"
        )


def _read_npz(path: Path) -> dict[str, Any]:
    from ...data.arrays import npz_arrays  # needed for this format only

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(_values(path, npz_arrays(path)))
    except FeedError as error:
        raise CheckpointError(
            error.message,
            hint="save a flat dict of arrays: numpy.savez(path, **arrays); or copy the file again",
        ) from error


def _values(path: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, Any]]:
    """Yields arrays as tensors; strings, which some scripts save with them, are unchanged."""
    for key, array in arrays:
        if array.dtype.kind in "US":
            yield key, str(array)
            continue
        try:
            yield key, torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        except TypeError as error:
            raise CheckpointError(
                f"{path}: {key} has dtype {array.dtype}, which PyTorch cannot read",
                hint="save it as float32",
            ) from error


def _read_pickled(path: Path) -> Any:
    """Returns the object that `torch.save` wrote, its tensors memory-mapped if possible.

    Only tensors, containers, numbers and the `argparse.Namespace` of a training script's options
    are read. Raises CheckpointError for anything else, since loading it would run code.
    """
    # Files from before torch 1.6 are not zip archives and cannot be mapped.
    with path.open("rb") as file:
        start = file.read(tarfile.BLOCKSIZE)
    is_zip = start[:4] == b"PK\x03\x04"
    if is_zip:
        _check_archives(path)
    elif _is_tar(start):  # PyTorch's reader hangs on a malicious header
        raise CheckpointError(f"{path} is a tar file, PyTorch's format before 0.1.10", hint=RESAVE)
    _check_pickles(path, is_zip)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refusal(path, is_zip, str(error)) from error


def _is_tar(start: bytes) -> bool:
    """Whether the first block of a file is a tar header with a valid checksum."""
    try:
        tarfile.TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


GROWING = {"hex", "base64", "base_64", "quopri", "quoted_printable", "uu", "zip", "zlib", "bz2"}
"""Codecs from bytes to bytes, which can double the size each time they are applied."""


def _check_pickles(path: Path, is_zip: bool) -> None:
    """Raises CheckpointError for a pickle that creates large objects from small numbers.

    PyTorch's reader lets a pickle call `bytearray` with any size, and encode bytes repeatedly.
    """
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            pickles = [archive.read(e) for e in archive.infolist() if e.filename.endswith(".pkl")]
    else:
        with path.open("rb") as file:
            pickles = [file.read(PICKLE_BYTES)]  # the tensors' numbers follow
    for data in pickles:
        if b"bytearray" not in data and b"_codecs" not in data:
            continue
        names, strings = _pickled_names(io.BytesIO(data))
        codecs = {text.lower().replace("-", "_").removesuffix("_codec") for text in strings}
        bytearrays = [name for name in names if name.endswith(".bytearray")]
        if bytearrays or ("_codecs.encode" in names and codecs & GROWING):
            what = "makes a bytearray" if bytearrays else "encodes bytes"
            raise CheckpointError(f"{path} {what}, which weights do not need; refused", hint=RESAVE)


PICKLE_BYTES = 64 << 20
"""How much of a file from before torch 1.6 is searched for the names of pickled objects."""

HARMLESS = re.compile(r"torch\.(?!nn\.modules)|collections\.OrderedDict|argparse\.Namespace")
"""Names that every checkpoint refers to."""


def _refusal(path: Path, is_zip: bool, message: str) -> CheckpointError:
    """Returns the error for a pickle that torch refuses; names the classes and functions in it."""
    names = re.findall(r"GLOBAL ([\w.]+)", message)
    if is_zip:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        names += [name for name in unsafe if name != "argparse.Namespace"]
    elif not names:
        with path.open("rb") as file:
            names = [name for name in _pickled_names(file)[0] if not HARMLESS.match(name)]
    if not names:
        return CheckpointError(f"{path}: damaged, or not a file that torch.save wrote", hint=RESAVE)
    unique = list(dict.fromkeys(names))
    listed = ", ".join(f"`{name}`" for name in unique[:5])
    if any(name.startswith("torch.nn.modules.") for name in unique):
        what = f"it contains a whole pickled module and needs {listed}"
    else:
        what = f"loading it would run {listed}"
    return CheckpointError(
        f"{path}: {what}; refused: moexport never executes pickled code", hint=RESAVE
    )


def _pickled_names(file: IO[bytes]) -> tuple[list[str], list[str]]:
    """Returns the names and the texts in a file's pickles, read without executing them."""
    names: list[str] = []
    strings: list[str] = []
    while True:
        try:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":
                    names.append(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                    names.append(".".join(strings[-2:]))
                elif isinstance(argument, str):
                    strings.append(argument)
        except (ValueError, IndexError):
            return names, strings
