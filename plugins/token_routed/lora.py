"""Merges LoRA factors in a folder of `transformers` as peft does: W + α/r · B A.

The factors are in separate files next to the weights, or among the weights. α is only in
`adapter_config.json`. Any other change by an adapter is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...common.documents import read_document
from ...errors import CheckpointError

CONFIG = "adapter_config.json"

MERGE = "merge the adapter first: merge_and_unload() in peft, then save_pretrained"

FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<which>[AB])(?:\.(?P<name>(?!weight$)[^.]+))?(?:\.weight)?"
)
"""Matches keys of factors of loralib, and of peft with or without the adapter's name."""

WRAPPED = "base_model.model."
"""The prefix that peft puts before every key."""

ALLOWED = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "target_modules", "exclude_modules", "layers_pattern"),
    *("layers_to_transform", "r", "lora_alpha", "lora_dropout", "rank_pattern", "use_rslora"),
    *("init_lora_weights", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
"""Fields of the configuration that are read here or have no effect after training."""

INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that set only the factors; others also change the weights."""


Pair = tuple[str, str]
"""The keys of the two factors of a module, A and B."""


def factors_in(keys: Mapping[str, Any], path: Path) -> dict[str, Pair]:
    """Returns the factors among the keys of a file, by the module that they change.

    Raises `CheckpointError` for a factor without its counterpart, and for several adapters.
    """
    found: dict[str, dict[str, str]] = {}
    names = set()
    for key in keys:
        match = FACTOR.fullmatch(key)
        if match is not None:
            module = match["module"].removeprefix(WRAPPED)
            found.setdefault(module, {})[match["which"]] = key
            names.add(match["name"])
    if len(names) > 1:
        listed = ", ".join(sorted(name or "one without a name" for name in names))
        raise CheckpointError(f"{path} has several LoRA adapters: {listed}", hint=MERGE)
    for module, pair in found.items():
        if len(pair) == 1:
            key = next(iter(pair.values()))
            raise CheckpointError(
                f"{path}: {key} is one factor of a LoRA pair of {module}; the other is missing",
                hint=MERGE,
            )
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def check_config(file: Path) -> dict[str, Any]:
    """Returns an adapter's configuration; raises `CheckpointError` for anything but plain LoRA."""
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} has LoRA factors, but no {CONFIG} with their α", hint=MERGE
        )
    config = read_document(file, "json", CheckpointError)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(f"{file}: the adapter's type is {kind}, not LORA", hint=MERGE)
    neutral = {"bias": "none", "lora_bias": False, "init_lora_weights": True}
    others = [key for key, value in config.items() if key not in ALLOWED | neutral.keys() and value]
    others += [key for key in ("bias", "lora_bias") if config.get(key) not in (neutral[key], None)]
    if config.get("init_lora_weights", True) not in INITIAL:
        others.append("init_lora_weights")
    if others:
        raise CheckpointError(
            f"{file}: {others[0]} is {config[others[0]]!r}, which is not plain LoRA", hint=MERGE
        )
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"{file}: {key} is {value!r}, not a positive number", hint=MERGE)
    return config


def merged(weight: Tensor, a: Tensor, b: Tensor, config: Mapping[str, Any], what: str) -> Tensor:
    """Returns a weight [o, i] with factors A [r, i] and B [o, r] merged into it, as float32."""
    shapes = [list(tensor.shape) for tensor in (weight, a, b)]
    rank = a.shape[0] if a.ndim == 2 else 0
    fits = rank and weight.ndim == 2 and shapes[1:] == [[rank, shapes[0][1]], [shapes[0][0], rank]]
    if not fits or (rank != config["r"] and not config.get("rank_pattern")):
        raise CheckpointError(
            f"{what}: LoRA factors {shapes[1]} and {shapes[2]} of rank {config['r']} do not fit a "
            f"weight {shapes[0]}",
            hint=MERGE,
        )
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    change: Tensor = scale * (b.double() @ a.double())
    return (weight.double() + change).float()
