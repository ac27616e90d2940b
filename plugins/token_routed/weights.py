"""Loads the weights of a folder of `transformers`: every key of every file is used or reported.

The library is passed the tensors, not the folder, so it opens no file itself.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.files import Reading, Watched, release
from ...errors import CheckpointError, one_line
from ...exporter.checkpoints.floats import upcast
from ...exporter.checkpoints.state_dict import check_finite
from ...exporter.checkpoints.weight_files import SUFFIXES, WeightFiles, find_files, is_adapter
from . import CONFIG_FILE, GENERATION_FILE, lora
from .fp8 import DEQUANTISED
from .misfits import check_experts, check_mismatched, check_missing, check_names, check_surplus
from .plain import plain_tensors


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The weights of a folder, and of an adapter next to them.

    `path` is what the user passed: the folder, or one file in it; other files are then ignored.
    """

    path: Path
    weights: WeightFiles
    adapter: Path | None = None
    adapter_config: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        others = (self.adapter, self.adapter_config)
        return (*self.weights.files, *(file for file in others if file is not None))

    @property
    def folder(self) -> Path:
        return self.weights.files[0].parent


OTHER_COPIES = re.compile(r"adapter|lora|(^|[^a-z])ema([^a-z]|$)", re.IGNORECASE)
"""Matches names of files in other formats with weights that a user may expect to be read."""

DUPLICATES = "consolidated"
"""The prefix of files in which Mistral repeats the weights under its own names."""


def folder_files(path: Path) -> FolderFiles:
    """Returns the files with the weights of a folder, or with those of a file or an index in it.

    Raises `CheckpointError` for any other format, and for weights that would not be read.
    """
    weights = find_files(path)
    for file in weights.files:
        if file.suffix != ".safetensors":
            raise CheckpointError(
                f"{file}: weights of transformers models are read only from safetensors",
                hint="save the model again: model.save_pretrained(folder)",
            )
    file = weights.files[0].parent / lora.CONFIG
    config = file if file.is_file() else None
    if not path.is_dir():
        return FolderFiles(path, weights, adapter_config=config)
    others = sorted(
        file
        for file in path.iterdir()
        if file.suffix in SUFFIXES
        and file not in weights.files
        and (file.suffix == ".safetensors" or OTHER_COPIES.search(file.stem))
    )
    skipped = [file.name for file in others if file.name.startswith(DUPLICATES)]
    adapters = [file for file in others if is_adapter(file) and file.suffix == ".safetensors"]
    for file in others:
        if file.name not in skipped and file not in adapters:
            raise CheckpointError(
                f"{file} has weights that are not read, because {weights.files[0].name} is read",
                hint="move it out of the folder, or pass the path of the correct weights",
            )
    notes = (f"left out {', '.join(skipped)}: the names of its weights are not the library's",)
    adapter = adapters[0] if adapters else None
    return FolderFiles(path, weights, adapter, config, notes if skipped else ())


class _Recorded:
    """A tensor that adds its key to `read` when the library reads it."""

    def __init__(self, key: str, tensor: Tensor, read: set[str]) -> None:
        self._key, self._tensor, self._read = key, tensor, read

    def __getitem__(self, part: Any) -> Tensor:
        self._read.add(self._key)
        return self._tensor[part]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of the library in float32, the files that its weights are mapped from, and notes."""

    module: nn.Module
    mapped: tuple[Path, ...]
    notes: tuple[str, ...]


def load_weights(found: FolderFiles, class_: Any, config: Any, watched: Watched) -> LoadedModel:
    """Returns the model with its weights in float32.

    Raises `CheckpointError` if weights are missing, not used, or NaN.
    """
    quantisation = getattr(config, "quantization_config", None)
    plain = plain_tensors(found.weights, found.adapter, found.path, quantisation)
    if quantisation is not None:
        if not plain.dequantised:
            raise CheckpointError(
                f"{found.folder}: its weights are already quantised", hint=DEQUANTISED
            )
        config = copy.deepcopy(config)
        del config.quantization_config  # the weights now include its scales
    check_names(found.path, class_.base_model_prefix, plain.tensors)
    check_experts(found.path, plain.tensors)
    # Weights of this type are mapped, unless they are assembled from several.
    main = _most_common(plain.tensors)
    model, read, report = _read(found, class_, config, plain.tensors, main)
    if main != torch.float32 and (
        _has_narrow_buffers(model) or _was_narrowed(model, plain.tensors, read, main)
    ):
        model, read, report = _read(found, class_, config, plain.tensors, torch.float32)
    notes = check_surplus(found.path, model, plain.tensors.keys() - read, report)
    check_missing(found.path, model, report)
    check_mismatched(found.path, model, report)
    _check_numbers(found.path, model, plain.tensors, read)
    used = {key: plain.tensors[key] for key in sorted(read)}
    for tensors in (plain.read, used):
        check_finite(found.path, tensors, Reading(found.files, watched))
    _load_generation_config(model, found.folder)
    release(found.files)
    files = (*found.files, *(() if plain.mapped is None else (plain.mapped,)))
    mapped = (*files, *_to_float32(model, files))
    return LoadedModel(model, mapped, (*found.notes, *plain.notes, *notes))


def _most_common(tensors: Mapping[str, Tensor]) -> torch.dtype:
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            numbers[tensor.dtype] += tensor.numel()
    return max(numbers, key=numbers.__getitem__, default=torch.float32)


def _read(
    found: FolderFiles, class_: Any, config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[Any, set[str], Mapping[str, Any]]:
    """Returns a model of the library, the keys that it used, and its report on the weights."""
    read: set[str] = set()
    try:
        model, report = class_.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict={key: _Recorded(key, tensor, read) for key, tensor in tensors.items()},
            dtype=dtype,
            attn_implementation=attention_of(class_),
            ignore_mismatched_sizes=True,  # `check_mismatched` reports them
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # every architecture fails in its own way
        raise CheckpointError(
            f"{found.path}: transformers cannot load its weights: {one_line(error)}",
            hint=f"{CONFIG_FILE} and the weights must belong to the same model",
        ) from error
    return model, read, report


def attention_of(class_: Any) -> str:
    """Returns PyTorch's attention if the architecture supports it."""
    return "sdpa" if class_._supports_sdpa else "eager"


def _has_narrow_buffers(model: nn.Module) -> bool:
    """Returns whether tensors that are computed, not read, are narrower than float32."""
    read = model.state_dict().keys()
    return any(
        tensor.is_floating_point() and tensor.dtype != torch.float32
        for name, tensor in model.named_buffers()
        if name not in read
    )


def _was_narrowed(
    model: nn.Module, tensors: Mapping[str, Tensor], read: set[str], main: torch.dtype
) -> bool:
    """Returns whether tensors of types wider than `main` were rounded to `main`."""
    used = {tensor.data_ptr() for tensor in model.state_dict().values()}
    return any(
        tensor.is_floating_point()
        and torch.promote_types(tensor.dtype, main) != main
        and tensor.data_ptr() not in used
        for tensor in (tensors[key] for key in read)
    )


def _check_numbers(path: Path, model: Any, tensors: Mapping[str, Tensor], read: set[str]) -> None:
    """Raises `CheckpointError` for integers instead of floats, and for two keys of one weight."""
    state = model.state_dict()
    integers = Counter(tuple(t.shape) for t in state.values() if not t.is_floating_point())
    for key in sorted(read):
        tensor = tensors[key]
        if not tensor.is_floating_point():
            integers[tuple(tensor.shape)] -= 1
            if integers[tuple(tensor.shape)] < 0:
                raise CheckpointError(
                    f"{path}: {key} has integers ({str(tensor.dtype).removeprefix('torch.')}), "
                    "but the network computes with floats",
                    hint=DEQUANTISED,
                )
    sums, tied = {0}, set(getattr(model, "all_tied_weights_keys", None) or ())
    for size in (state[key].numel() for key in tied if key in state):
        sums |= {size + total for total in sums}  # a tied weight may be saved under all its names
    needed = sum(tensor.numel() for key, tensor in state.items() if key not in tied)
    saved = sum(tensors[key].numel() for key in read)
    if saved > needed and saved - needed not in sums:
        raise CheckpointError(
            f"{path} has {saved} numbers for {needed} parameters, some under two names",
            hint="save each weight under one name",
        )


def _load_generation_config(model: Any, folder: Path) -> None:
    """Sets a model's generation settings from its folder, which the library did not read."""
    if not model.can_generate():
        return
    from transformers import GenerationConfig

    written = (folder / GENERATION_FILE).is_file()
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            str(folder),
            GENERATION_FILE if written else CONFIG_FILE,
            local_files_only=True,
            **({} if written else {"_from_model_config": True}),
        )
    except Exception as error:  # the file may contain anything
        raise CheckpointError(
            f"{folder / GENERATION_FILE}: transformers cannot read the file: {one_line(error)}",
            hint="remove it, or save it again: generation_config.save_pretrained(folder)",
        ) from error


def _to_float32(model: Any, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Converts a model's weights to float32, in place; returns the files they are mapped from."""
    model.config.dtype = torch.float32
    to_convert: dict[str, Tensor] = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and tensor.dtype != torch.float32
    }
    converted, file = upcast({name: tensor.detach() for name, tensor in to_convert.items()}, files)
    for name, tensor in to_convert.items():
        tensor.data = converted[name]
    return () if file is None else (file,)
