"""Reads a checkpoint as named float32 tensors: unwrapped, cleaned and checked.

The entry point is `read_checkpoint`. Weights of other types are converted to float32 in a temporary
file, which is mapped like the checkpoint, so loading makes no second copy of them.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.files import Reading, Watched, allowed_bytes
from ...errors import CheckpointError
from .floats import upcast
from .weight_files import find_files, read_files

ARGUMENTS = ("model_args", "hyper_parameters")
"""Keys under which nanoGPT and its descendants, and Lightning, save the constructor's arguments."""

OPTIONS = ("config", "args")
"""Keys under which training scripts save their options, which may include constructor arguments."""

WRAPPERS = ("model", "state_dict", "module", "model_ema", "state_dict_ema")
"""Keys under which training scripts save the state dict, in order of preference."""

AVERAGES = ("model_ema", "state_dict_ema")

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "params.", "opt.target.")
"""Prefixes that every key may have: from DataParallel and torch.compile, from a LightningModule's
attribute for its network, and from training code in JAX."""

TRAINING = re.compile(
    r"(criterion|loss(_\w+)?|\w+_loss|(\w+_)?metrics?|(\w+_)?acc(uracy)?|(train|val|valid|test)_\w+)\."
)
"""Parts of a LightningModule other than its network: losses and metrics with state."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state dict with the keys of its author's model.

    Floating-point `tensors` are float32, memory-mapped if the file stores float32. If read without
    `values`, they keep the file's types, except for 8-bit floats. `prefixes` were removed from all
    keys, outermost first. `config` is a `config.json` next to the weights. `arguments` are
    the constructor's arguments in the file, and `options` those of the training script, each by its
    key. `mapped` are the files that `tensors` are mapped from: `files`, and a temporary file of
    converted weights. `from_jax`: the files come from training code in JAX. `watched` are the
    states of the files when they were read; None without `values`.
    """

    tensors: dict[str, Tensor]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    config: Path | None = None
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mapped: tuple[Path, ...] = ()
    watched: Watched | None = None
    from_jax: bool = False


def read_checkpoint(source: Path, *, values: bool = True) -> Checkpoint:
    """Returns the weights in `source`: a file, an index of shards, or a folder with them.

    Without `values` the steps that read every weight are skipped, for inspecting shapes: the search
    for NaN, the conversion to float32 and the hash. Raises CheckpointError naming the file or key.
    """
    try:
        return _read(source, values=values)
    except OSError as error:
        raise CheckpointError(
            f"{source}: cannot be read: {error.strerror or error}",
            hint="check the path and its permissions",
        ) from error
    except MemoryError as error:
        raise CheckpointError(
            f"{source}: not enough memory to read it", hint="use a machine with more memory"
        ) from error


def _read(source: Path, *, values: bool) -> Checkpoint:
    weights = find_files(source)
    watched = Watched.now(weights.files) if values else None
    notes: list[str] = []
    widened: tuple[Path, ...] = ()
    saved: Mapping[str, Any]
    if weights.arrays is not None:
        notes.append(weights.arrays.note)
    if weights.arrays is not None and values:
        saved, file = weights.arrays.read(watched)
        widened = () if file is None else (file,)
    else:
        saved = read_files(weights)
    content = _unwrap(saved, notes)
    tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        entries = [f"{key} ({type(value).__name__})" for key, value in content.items()]
        raise CheckpointError(
            f"{source} has no tensors; it contains {', '.join(entries[:6]) or 'nothing'}",
            hint="save the model's state_dict()",
        )
    others = [str(key) for key in content if str(key) not in tensors]
    if others:
        notes.append(f"skipped entries that are not tensors: {', '.join(others[:6])}")
    if weights.arrays is None:
        _check_plain(source, tensors, sum(file.stat().st_size for file in weights.files))
    if not any("." in key for key in tensors):  # a JAX flat dict: `Router/mu` is `Router.mu`
        tensors = {key.strip("/").replace("/", "."): value for key, value in tensors.items()}
    tensors, prefixes = _without_prefixes(_network_tensors(tensors, notes))
    if prefixes:
        notes.append(f"removed the prefix {''.join(prefixes)} from every key")
    types = FLOAT8 if watched is None else FLOATS
    tensors, converted = _as_float32(tensors, types, notes, weights.files, watched)
    mapped = weights.files + widened + converted
    if watched is not None:
        check_finite(source, tensors, Reading(mapped, watched))
        watched = watched.hashed()
        watched.check_states()
    return Checkpoint(
        tensors=tensors,
        files=weights.files,
        notes=tuple(notes),
        prefixes=prefixes,
        config=weights.config,
        arguments=_settings(saved, ARGUMENTS),
        options=_settings(saved, OPTIONS),
        mapped=mapped,
        watched=watched,
        from_jax=weights.arrays is not None,
    )


FLOAT8 = (
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
"""Types in which PyTorch cannot compute at all."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, *FLOAT8)
"""The floating-point types that can be converted; others pack several numbers in a byte."""


def _check_plain(source: Path, tensors: dict[str, Tensor], size: int) -> None:
    """Raises CheckpointError for packed tensors, and for shapes far larger than the file.

    A tensor may repeat its numbers (`expand`), and so declare a shape that exceeds any memory.
    """
    declared = 0
    for key, tensor in tensors.items():
        kind = (
            "nested"
            if tensor.is_nested
            else "quantised"
            if tensor.is_quantized
            else "sparse"
            if tensor.layout != torch.strided
            else f"of type {str(tensor.dtype).removeprefix('torch.')}"
            if tensor.is_floating_point() and tensor.dtype not in FLOATS
            else None
        )
        if kind is not None:
            raise CheckpointError(
                f"{source}: {key} is {kind}, not a plain tensor",
                hint="save it as float32: tensor.dequantize() or tensor.to_dense()",
            )
        if not tensor.is_meta:
            declared += tensor.numel() * tensor.element_size()
        if declared > allowed_bytes(size):
            raise CheckpointError(
                f"{source}: its tensors up to {key} of shape {list(tensor.shape)} need {declared} "
                f"bytes, but the file has {size}",
                hint="save tensors that own their data: tensor.contiguous() or tensor.clone()",
            )


def _unwrap(content: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """Returns the innermost state dict, inside the wrappers of training scripts."""
    visited: list[int] = []
    while id(content) not in visited:  # a mapping may contain itself
        visited.append(id(content))
        present = [key for key in WRAPPERS if isinstance(content.get(key), Mapping)]
        if not present:
            return content
        chosen = present[0]
        averages = [key for key in present[1:] if key in AVERAGES]
        if averages and chosen not in AVERAGES:
            notes.append(
                f"read the weights under {chosen!r}; the moving average under {averages[0]!r} was "
                "ignored (save it alone to export it)"
            )
        else:
            notes.append(f"read the weights under {chosen!r}")
        content = content[chosen]
    return {}


def _settings(saved: Mapping[str, Any], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the values of these keys, if they are mappings or of type `argparse.Namespace`."""
    values = {key: saved[key] for key in keys if key in saved}
    settings = {k: vars(v) if isinstance(v, Namespace) else v for k, v in values.items()}
    return {
        key: {str(name): setting for name, setting in value.items()}
        for key, value in settings.items()
        if isinstance(value, Mapping)
    }


def _network_tensors(tensors: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """Returns the tensors without losses and metrics, if all others have a known prefix."""
    network = {key: value for key, value in tensors.items() if not TRAINING.match(key)}
    others = [key for key in tensors if key not in network]
    if not network or not others or not _without_prefixes(network)[1]:
        return tensors
    notes.append(f"left out tensors that only training needs: {', '.join(others[:6])}")
    return network


def _without_prefixes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Returns the tensors without the prefixes that all keys share, and those prefixes in order."""
    removed: list[str] = []
    while True:
        shared = next((p for p in PREFIXES if all(k.startswith(p) for k in tensors)), None)
        if shared is None:
            return tensors, tuple(removed)
        tensors = {key.removeprefix(shared): value for key, value in tensors.items()}
        removed.append(shared)


MAX_FLOAT32 = torch.finfo(torch.float32).max


def check_finite(source: Path | str, tensors: Mapping[str, Tensor], reading: Reading) -> None:
    """Raises CheckpointError for a weight that is NaN or infinite, naming its key."""
    for key, tensor in tensors.items():
        if tensor.is_meta or not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if tensor.dtype in FLOAT8:  # other tensors contain its scales
            continue
        # The extremes of a tensor with a NaN are NaN; finding them allocates nothing.
        low, high = (float(x) for x in torch.aminmax(tensor.detach()))
        if not (low >= -MAX_FLOAT32 and high <= MAX_FLOAT32):
            value = "NaN" if math.isnan(low) or math.isnan(high) else "infinite values"
            if math.isfinite(low) and math.isfinite(high):
                value = "numbers that are infinite in float32"
            raise CheckpointError(
                f"{source}: {key} contains {value}",
                hint="the training diverged or the file is damaged: use an earlier checkpoint",
            )
        reading.advance(tensor.nbytes)
    reading.end()


# --- other number types ------------------------------------------------------------------------


def _as_float32(
    tensors: dict[str, Tensor],
    types: Collection[torch.dtype],
    notes: list[str],
    files: tuple[Path, ...],
    watched: Watched | None,
) -> tuple[dict[str, Tensor], tuple[Path, ...]]:
    """Converts tensors of these types to float32; other tensors are passed on without a copy.

    Also returns the file that the converted ones are mapped from, if any.
    """
    others = {
        key: tensor
        for key, tensor in tensors.items()
        if tensor.dtype in types and tensor.dtype != torch.float32
    }
    if not others:
        return tensors, ()
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in others.values()})
    notes.append(f"converted {', '.join(dtypes)} weights to float32")
    converted, file = upcast(others, files, watched)
    return {**tensors, **converted}, () if file is None else (file,)
