"""The weights of a folder of `transformers`: every key of every file is used, or reported.

The library gets the tensors, not the folder, so it opens no file by itself.
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

    `place` is what the user gave: the folder, or one file in it; other files are then ignored.
    """

    place: Path
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
"""Parts of the names of files in other formats: weights that a user may expect to be read."""

SAME_IN_OTHER_NAMES = "consolidated"
"""Prefixes of files in which Mistral repeats the weights under its own names."""


def folder_files(place: Path) -> FolderFiles:
    """Returns the files of weights in a folder, or of a file or an index in it.

    Raises `CheckpointError` for another format, and for files of weights that would not be read.
    """
    weights = find_files(place)
    for file in weights.files:
        if file.suffix != ".safetensors":
            raise CheckpointError(
                f"{file}: weights of transformers models are read only from safetensors",
                hint="save it again: model.save_pretrained(folder)",
            )
    file = weights.files[0].parent / lora.CONFIG
    config = file if file.is_file() else None
    if not place.is_dir():
        return FolderFiles(place, weights, adapter_config=config)
    others = sorted(
        file
        for file in place.iterdir()
        if file.suffix in SUFFIXES
        and file not in weights.files
        and (file.suffix == ".safetensors" or OTHER_COPIES.search(file.stem))
    )
    left = [file.name for file in others if file.name.startswith(SAME_IN_OTHER_NAMES)]
    adapters = [file for file in others if is_adapter(file) and file.suffix == ".safetensors"]
    for file in others:
        if file.name not in left and file not in adapters:
            raise CheckpointError(
                f"{file} has weights that are not read, because {weights.files[0].name} is read",
                hint="move it out of the folder, or give the path of the correct weights",
            )
    notes = (f"left out {', '.join(left)}: weights by names that are not the library's",)
    adapter = adapters[0] if adapters else None
    return FolderFiles(place, weights, adapter, config, notes if left else ())


class _OnDemand:
    """A tensor that the library reads on demand; its key is then added to `taken`."""

    def __init__(self, key: str, tensor: Tensor, taken: set[str]) -> None:
        self._key, self._tensor, self._taken = key, tensor, taken

    def __getitem__(self, part: Any) -> Tensor:
        self._taken.add(self._key)
        return self._tensor[part]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of the library in float32, the files that it is mapped from, and notes."""

    module: nn.Module
    mapped: tuple[Path, ...]
    notes: tuple[str, ...]


def load_weights(found: FolderFiles, class_: Any, config: Any, watched: Watched) -> LoadedModel:
    """Returns the model with its weights in float32.

    Raises `CheckpointError` if weights are missing, if a key is not used, and for NaN.
    """
    quantisation = getattr(config, "quantization_config", None)
    plain = plain_tensors(found.weights, found.adapter, found.place, quantisation)
    if quantisation is not None:
        if not plain.dequantised:
            raise CheckpointError(
                f"{found.folder}: its weights are already quantised", hint=DEQUANTISED
            )
        config = copy.deepcopy(config)
        del config.quantization_config  # its scales are in the weights now
    check_names(found.place, class_.base_model_prefix, plain.tensors)
    check_experts(found.place, plain.tensors)
    # In the type of most weights these are mapped, unless they are assembled from several.
    main = _most_common(plain.tensors)
    model, taken, report = _read(found, class_, config, plain.tensors, main)
    if main != torch.float32 and (
        _computed_otherwise(model) or _narrowed(model, plain.tensors, taken, main)
    ):
        model, taken, report = _read(found, class_, config, plain.tensors, torch.float32)
    notes = check_surplus(found.place, model, plain.tensors.keys() - taken, report)
    check_missing(found.place, model, report)
    check_mismatched(found.place, model, report)
    _check_numbers(found.place, model, plain.tensors, taken)
    used = {key: plain.tensors[key] for key in sorted(taken)}
    for tensors in (plain.read, used):
        check_finite(found.place, tensors, Reading(found.files, watched))
    _generation(model, found.folder)
    release(found.files)
    places = (*found.files, *(() if plain.place is None else (plain.place,)))
    mapped = (*places, *_as_float32(model, places))
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
    """Returns a model of the library, the keys that it took, and its report on its weights."""
    taken: set[str] = set()
    try:
        model, report = class_.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict={key: _OnDemand(key, tensor, taken) for key, tensor in tensors.items()},
            dtype=dtype,
            attn_implementation=attention_of(class_),
            ignore_mismatched_sizes=True,  # they are reported by name
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # every architecture fails in its own way
        raise CheckpointError(
            f"{found.place}: transformers cannot load its weights: {one_line(error)}",
            hint=f"{CONFIG_FILE} and the weights must belong to the same model",
        ) from error
    return model, taken, report


def attention_of(class_: Any) -> str:
    """Returns PyTorch's own attention, if it supports the architecture."""
    return "sdpa" if class_._supports_sdpa else "eager"


def _computed_otherwise(model: nn.Module) -> bool:
    """Returns whether tensors that are computed, not read, were computed in less than float32."""
    read = model.state_dict().keys()
    return any(
        tensor.is_floating_point() and tensor.dtype != torch.float32
        for name, tensor in model.named_buffers()
        if name not in read
    )


def _narrowed(
    model: nn.Module, tensors: Mapping[str, Tensor], taken: set[str], main: torch.dtype
) -> bool:
    """Returns whether tensors of wider types than most were rounded to the type of most."""
    used = {tensor.data_ptr() for tensor in model.state_dict().values()}
    return any(
        tensor.is_floating_point()
        and torch.promote_types(tensor.dtype, main) != main
        and tensor.data_ptr() not in used
        for tensor in (tensors[key] for key in taken)
    )


def _check_numbers(place: Path, model: Any, tensors: Mapping[str, Tensor], taken: set[str]) -> None:
    """Raises `CheckpointError` for integers in place of floats, and for two keys of one weight."""
    state = model.state_dict()
    whole = Counter(tuple(t.shape) for t in state.values() if not t.is_floating_point())
    for key in sorted(taken):
        tensor = tensors[key]
        if not tensor.is_floating_point():
            whole[tuple(tensor.shape)] -= 1
            if whole[tuple(tensor.shape)] < 0:
                raise CheckpointError(
                    f"{place}: {key} has integers ({str(tensor.dtype).removeprefix('torch.')}), "
                    "but the network computes with floats",
                    hint=DEQUANTISED,
                )
    sums, tied = {0}, set(getattr(model, "all_tied_weights_keys", None) or ())
    for size in (state[key].numel() for key in tied if key in state):
        sums |= {size + total for total in sums}  # a tied weight may be saved by each of its names
    own = sum(tensor.numel() for key, tensor in state.items() if key not in tied)
    given = sum(tensors[key].numel() for key in taken)
    if given > own and given - own not in sums:
        raise CheckpointError(
            f"{place} has {given} numbers for {own} parameters, some under two names",
            hint="save only the correct weights",
        )


def _generation(model: Any, folder: Path) -> None:
    """Gives a model the generation settings in its folder, which the library did not read."""
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
            f"{folder / GENERATION_FILE}: transformers cannot read it: {one_line(error)}",
            hint="remove it, or save it again: generation_config.save_pretrained(folder)",
        ) from error


def _as_float32(model: Any, files: tuple[Path, ...]) -> tuple[Path, ...]:
    """Converts a model's weights to float32, in place; returns the file they are mapped from."""
    model.config.dtype = torch.float32
    others: dict[str, Tensor] = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and tensor.dtype != torch.float32
    }
    converted, file = upcast({name: tensor.detach() for name, tensor in others.items()}, files)
    for name, tensor in others.items():
        tensor.data = converted[name]
    return () if file is None else (file,)
