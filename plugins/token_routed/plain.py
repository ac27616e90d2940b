"""The tensors of a folder of `transformers` as plain floats with the names of its class.

Prefixes that training put around a module are removed, eight-bit weights are multiplied by their
scales, and LoRA factors are merged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from ...exporter.checkpoints.floats import uninitialised
from ...exporter.checkpoints.state_dict import FLOAT8, PREFIXES
from ...exporter.checkpoints.weight_files import WeightFiles, read_file, read_files
from . import fp8, lora

BEFORE_ALL = (*(prefix for prefix in PREFIXES if prefix != "model."), lora.WRAPPED)
"""Prefixes that training tools put before every key; the library itself handles `model.`."""

WITHIN = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that `torch.compile`, FSDP and gradient checkpointing put before the keys of a module."""

BASE = "base_layer."
"""The prefix of the weights of a module to which peft added factors."""


@dataclass(frozen=True, slots=True)
class PlainTensors:
    """Tensors by the keys that a class of the library expects, and notes on what was changed.

    `read` has the tensors in the files from which others were computed, by their keys there.
    `mapped` is the temporary file that computed tensors are mapped from, if any. `dequantised`:
    some weights had eight bits.
    """

    tensors: dict[str, Tensor]
    read: dict[str, Tensor]
    notes: tuple[str, ...]
    mapped: Path | None
    dequantised: bool


Compute = Callable[[], Tensor]


def plain_tensors(
    weights: WeightFiles, adapter: Path | None, path: Path, quantisation: Any = None
) -> PlainTensors:
    """Returns the tensors in a folder's files, with the adapter merged into them.

    `quantisation` is the quantisation configuration. Raises `CheckpointError` for weights and
    adapters whose meaning is ambiguous.
    """
    tensors, notes = _without_prefixes(dict(read_files(weights)))
    factors = {k: t for k, t in tensors.items() if lora.FACTOR.fullmatch(k)}
    rest = {k: t for k, t in tensors.items() if k not in factors}
    pairs = lora.factors_in(factors, path)
    if adapter is not None:
        factors = dict(read_file(adapter))
        other = next((key for key in factors if not lora.FACTOR.fullmatch(key)), None)
        if other is not None or pairs:
            what = f"{other} is not plain LoRA" if other else "the weights also contain LoRA"
            raise CheckpointError(f"{adapter}: {what}", hint=lora.MERGE)
        pairs = lora.factors_in(factors, adapter)
    config = weights.files[0].parent / lora.CONFIG
    if path.is_dir() and config.is_file() and not pairs:
        raise CheckpointError(
            f"{config}: the file describes an adapter, but {path} has no adapter's factors",
            hint="remove the file if the adapter is already merged",
        )
    rest = {_without_base(key, pairs): tensor for key, tensor in rest.items()}
    computed, read = _dequantisations(rest, path, fp8.blocks_of(quantisation))
    dequantised = bool(computed)
    if dequantised:
        notes.append(f"multiplied {len(computed)} eight-bit weights by their scales")
    if pairs:
        source = adapter or path
        settings = lora.check_config(config)
        _merge(rest, (factors, pairs), settings, computed, source)
        read |= factors
        notes.append(
            f"merged the LoRA adapter of {source.name} into {len(pairs)} weights "
            f"(r {settings['r']}, alpha {settings['lora_alpha']})"
        )
    shapes = {key: tuple(rest[key].shape) for key in computed}
    floats, file = uninitialised(shapes)
    for key, compute in computed.items():
        floats[key].copy_(compute())
    kept = {key: tensor for key, tensor in rest.items() if key not in read}
    return PlainTensors({**kept, **floats}, read, tuple(notes), file, dequantised)


def _without_prefixes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors without prefixes that training put around modules, and a note."""
    removed: dict[str, None] = {}
    while shared := next((p for p in BEFORE_ALL if all(k.startswith(p) for k in tensors)), None):
        tensors = {key.removeprefix(shared): tensor for key, tensor in tensors.items()}
        removed[shared] = None
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        removed |= dict.fromkeys(f"{name}." for name in WITHIN.findall(key))
        named[WITHIN.sub("", key)] = tensor
    notes = [f"removed {', '.join(removed)} from keys"] if removed else []
    return (named if len(named) == len(tensors) else tensors), notes


def _without_base(key: str, pairs: Mapping[str, lora.Pair]) -> str:
    module, found, last = key.rpartition(f".{BASE}")
    return f"{module}.{last}" if found and module in pairs else key


def _dequantisations(
    tensors: Mapping[str, Tensor], path: Path, blocks: tuple[int, int] | None
) -> tuple[dict[str, Compute], dict[str, Tensor]]:
    """Returns how to compute each eight-bit weight, and the scales by their own keys."""
    weights = [key for key, tensor in tensors.items() if tensor.dtype in FLOAT8]
    scales = {key: fp8.scales_of(key, tensors, path) for key in weights}
    read = {scale: tensors[scale] for scale in scales.values()}
    if weights:
        read |= {k: t for k, t in tensors.items() if fp8.ACTIVATIONS.search(k)}
    remaining = [key for key in weights if key not in read]  # scales may have eight bits themselves
    return {key: partial(fp8.dequantised, key, tensors, path, blocks) for key in remaining}, read


def _merge(
    tensors: Mapping[str, Tensor],
    factors: tuple[Mapping[str, Tensor], Mapping[str, lora.Pair]],
    config: Mapping[str, Any],
    computed: dict[str, Compute],
    source: Path,
) -> None:
    """Adds to `computed` how to compute each weight that has factors."""
    values, pairs = factors

    def compute(key: str, before: Compute | None, pair: lora.Pair) -> Tensor:
        weight = tensors[key] if before is None else before()
        a, b = (values[factor] for factor in pair)
        return lora.merged(weight, a, b, config, f"{source}: {key}")

    for module, pair in pairs.items():
        key = f"{module}.weight"
        if key not in tensors:
            raise CheckpointError(
                f"{source}: {pair[0]} is a factor of {key}, which is not in the folder",
                hint=lora.MERGE,
            )
        computed[key] = partial(compute, key, computed.get(key), pair)
