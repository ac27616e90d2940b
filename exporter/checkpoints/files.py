"""From a path to named tensors: every kind of file in which people keep weights."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError
from .pickles import DAMAGED, load_pickled

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*PICKLED, ".safetensors", ".npz")
INDEX = ".index.json"

STANDARD = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face's libraries call the weights, in the order in which they prefer them; beside
them lie `config.json`, and in a Trainer's folder its optimizer and its arguments."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of one checkpoint: one, or the shards that an index lists.

    `keys` maps each shard to the keys that the index expects in it (empty for a single file);
    `config` is the `config.json` of the folder the files were found in.
    """

    files: tuple[Path, ...]
    keys: Mapping[Path, tuple[str, ...]]
    config: Path | None = None


def find_files(source: Path) -> WeightFiles:
    """Returns the weight files that `source` means: a file, an index of shards, or a folder.

    Raises CheckpointError when there is none, when a folder holds several, or when a shard that an
    index lists is not there.
    """
    if source.is_dir():
        return _find_in_folder(source)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file", hint="check the path")
    beside = source.parent / "config.json"
    config = beside if beside.is_file() else None
    if source.name.endswith(INDEX):
        return _read_index(source, config)
    if source.suffix.lower() not in SUFFIXES:
        raise CheckpointError(
            f"{source}: weights are read from {', '.join(SUFFIXES)} and *{INDEX}, "
            f"not from {source.suffix or 'a file without suffix'}"
        )
    return WeightFiles((source,), {}, config if source.name in STANDARD else None)


def _find_in_folder(folder: Path) -> WeightFiles:
    if (folder / "manifest.json").is_file() and (folder / "weights.bin").is_file():
        raise CheckpointError(
            f"{folder}: a bundle, which holds no checkpoint",
            hint=f"give the checkpoint that it was exported from: `moexport inspect {folder}` "
            "names it",
        )
    config = folder / "config.json"
    found_config = config if config.is_file() else None
    found = sorted(folder.glob(f"*{INDEX}"))
    if not found:
        found = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
        standard = [folder / name for name in STANDARD if folder / name in found]
        found = standard[:1] or found
    if not found:
        raise CheckpointError(
            f"{folder}: no weights in this folder",
            hint=f"it should hold one of {', '.join(SUFFIXES)} or an index *{INDEX}",
        )
    if len(found) > 1:
        names = ", ".join(p.name for p in found[:6])
        raise CheckpointError(
            f"{folder}: {len(found)} files could be the weights ({names})",
            hint="give the path of the one that is meant",
        )
    if found[0].name.endswith(INDEX):
        return _read_index(found[0], found_config)
    return WeightFiles((found[0],), {}, found_config)


def _read_index(index: Path, config: Path | None) -> WeightFiles:
    """The shards of a `*.index.json`, whose `weight_map` gives the file of every key."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        placed = {str(key): str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{index}: not an index of shards: it needs {{"weight_map": {{key: file}}}}'
        ) from error
    if not placed:
        raise CheckpointError(f"{index}: lists no weights")
    names = sorted(set(placed.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: shards must lie beside the index, not at {outside[0]}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:6])}",
            hint=f"put them into {index.parent}",
        )
    keys = {
        index.parent / name: tuple(key for key, place in placed.items() if place == name)
        for name in names
    }
    return WeightFiles(tuple(keys), keys, config)


def read_files(found: WeightFiles) -> Mapping[str, Any]:
    """Returns what the files hold: names to tensors, or to whatever else was saved beside them."""
    if not found.keys:
        return read_file(found.files[0])
    merged: dict[str, Any] = {}
    for path in found.files:
        shard = read_file(path)
        missing = [key for key in found.keys[path] if key not in shard]
        if missing:
            raise CheckpointError(
                f"{path}: {len(missing)} keys that the index places here are not in the shard: "
                f"{', '.join(missing[:4])}"
            )
        merged.update({key: shard[key] for key in found.keys[path]})
    return merged


def read_file(path: Path) -> Mapping[str, Any]:
    """Returns the mapping that one file holds; raises CheckpointError when it cannot be read."""
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path}: the file is empty", hint=DAMAGED)
    match path.suffix.lower():
        case ".safetensors":
            return _read_safetensors(path)
        case ".npz":
            return _read_npz(path)
    content = load_pickled(path)
    if isinstance(content, Tensor):
        raise CheckpointError(f"{path}: holds a single tensor, not a state dict")
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a state dict")
    return content


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged safetensors file: {error}", hint=DAMAGED) from error


def _read_npz(path: Path) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path}: damaged, or not a .npz file", hint=DAMAGED)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(_values(path, arrays.items()))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CheckpointError(f"{path}: damaged .npz file: {error}", hint=DAMAGED) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path}: holds more than plain arrays ({error}); pickled objects are never executed",
            hint="save a flat dict of arrays: numpy.savez(path, **arrays)",
        ) from error


def _values(path: Path, arrays: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, Any]]:
    """Arrays as tensors; texts, which some scripts save beside them, as they are."""
    for key, array in arrays:
        try:
            yield key, str(array) if array.dtype.kind in "US" else torch.from_numpy(array)
        except TypeError as error:
            raise CheckpointError(
                f"{path}: {key} has dtype {array.dtype}, which PyTorch cannot read",
                hint="save it as float32",
            ) from error
