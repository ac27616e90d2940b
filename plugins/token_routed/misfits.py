"""Explains why keys in a folder's files do not fit the network."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from . import CONFIG_FILE, lora
from .budget import MISMATCH
from .fp8 import DEQUANTISED

KINDS_OF_KEYS: Mapping[str, tuple[str, str]] = {
    r"lora_|\.ia3_|adapter|prompt_(embeddings|encoder)|modules_to_save|base_layer": (
        "a part of an adapter",
        lora.MERGE,
    ),
    r"(scales?|scale_inv|scale_\d|scale_weight|zero_?points?|q?zeros|g_idx|qweight|amax|absmax"
    r"|quant_map|quant_state.*|SCB|weight_format|packed|weight_shape|bitmask|blocks|codes|codebooks)$"
    r"|quantizer|(^|\.)scale": ("a scale or another part of quantised weights", DEQUANTISED),
    r"(^|[._])(ema|averaged?|swa|shadow)([._]|\d|$)|n_averaged": (
        "a moving average of weights",
        "save either the average or the weights themselves",
    ),
    r"optimizer|exp_avg|global_step|scheduler": (
        "a part of the training state",
        "save only the network: its save_pretrained",
    ),
    r"bias$": ("a bias that this network does not have", ""),
    r"(^|\.)(lm_head|score|classifier|qa_outputs|v_head|value_head|summary)\.": (
        "a head of a different class",
        f'set "architectures" in {CONFIG_FILE} to the class that was saved',
    ),
}
"""Patterns of keys that the network lacks, with their likely origin and a remedy."""

LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers|h|blocks?))\.(\d+)\.")
"""The prefix of a layer's key, up to and including the layer's number."""

PREDICTION = re.compile(r"(^|\.)(mtp\w*|nextn\w*|eh_proj|enorm|hnorm|shared_head)(\.|$)")
"""A part of the keys of layers for multi-token prediction, in training or speculative decoding."""

NUMBERED = re.compile(r"^(.*experts?[._])(\d+)(\..*)$")

COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Values that older versions of the library saved, though they are computed."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields of a configuration that contain the number of experts of a layer."""

ALL_EXPERTS = (
    "save all experts of the layer, or pass a network with pruned experts as package.module:factory"
)

_SAVED_SEPARATELY = "save the weights and config.json together: model.save_pretrained(folder)"


def check_surplus(
    path: Path, model: Any, surplus: Iterable[str], report: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns a note on the surplus keys if the network needs none of them.

    The class lists those as ignored, or they belong to layers for multi-token prediction. Raises
    `CheckpointError` for any other key.
    """
    surplus = sorted(surplus)
    extra_layers = _prediction_layers(model, surplus)
    patterns = (*(model._keys_to_ignore_on_load_unexpected or ()), *COMPUTED)
    unknown = [
        key
        for key in surplus
        if not (PREDICTION.search(key) and not _has_layer(model, key))
        and not any(key.startswith(layer) for layer in extra_layers)
        and not any(re.search(p, key) for p in patterns if not _names_own_layer(p, model, key))
    ]
    if unknown:
        raise _surplus_error(path, model, unknown, report)
    surplus = [key for key in surplus if not any(re.search(p, key) for p in COMPUTED)]
    if not surplus:
        return ()
    prefixes = ", ".join(dict.fromkeys(_key_prefix(key) for key in surplus))
    return (f"left out {len(surplus)} weights that the network does not use: {prefixes}",)


def _prediction_layers(model: Any, keys: Iterable[str]) -> set[str]:
    """Returns the prefixes of layers for multi-token prediction, beyond the network's own."""
    text = model.config.get_text_config()
    count = getattr(text, "num_hidden_layers", 0)
    more_layers = getattr(text, "num_nextn_predict_layers", None) or 0
    found = set()
    for key in keys:
        match = LAYER.match(key)
        number = int(match[2]) if match else -1
        if match and number >= count and (number < count + more_layers or PREDICTION.search(key)):
            found.add(match[0])
    return found


def _has_layer(model: Any, key: str) -> bool:
    """Returns whether the layer that a key belongs to is one of the network's."""
    match = LAYER.match(key)
    modules = dict(model.named_modules())
    base = f"{model.base_model_prefix}."
    name = match[0].rstrip(".") if match else ""
    return bool(name) and (name in modules or base + name in modules)


def _names_own_layer(pattern: str, model: Any, key: str) -> bool:
    """Returns whether a pattern of ignored keys contains the number of a layer of the network."""
    return re.search(r"layers\\\.\d", pattern) is not None and _has_layer(model, key)


def _key_prefix(key: str) -> str:
    match = LAYER.match(key)
    return match[0] + "…" if match else ".".join(key.split(".")[:2]) + ("." in key) * "…"


def _surplus_error(
    path: Path, model: Any, unknown: list[str], report: Mapping[str, Any]
) -> CheckpointError:
    # The most informative patterns come first: those of an adapter explain more than a bias.
    first, what, hint = unknown[0], "", ""
    for pattern, (origin, advice) in KINDS_OF_KEYS.items():
        match = next((key for key in unknown if re.search(pattern, key)), None)
        if match is not None:
            first, what, hint = match, f", which looks like {origin}", advice
            break
    if what.endswith("not have"):
        hint = _bias_hint(model)
    layer = LAYER.match(first)
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if not what and layer and count is not None and int(layer[2]) >= count:
        what = f", because {CONFIG_FILE} has only {count} layers"
    missing = sorted(report["missing_keys"])
    embedded = next((key for key in unknown if missing and key.endswith(f".{missing[0]}")), None)
    if embedded is not None:  # the network was saved as part of a larger one
        first, what = embedded, ""
        prefix = first.removesuffix(missing[0])
        hint = f"save only the network with its save_pretrained: its keys then lack {prefix}"
    if missing:
        what += f"; {missing[0]} is missing"
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    return CheckpointError(
        f"{path}: {type(model).__name__} has no parameter {first}{more}{what}",
        hint=hint or MISMATCH,
    )


def _bias_hint(model: Any) -> str:
    fields = ("attention_bias", "add_qkv_bias", "qkv_bias", "use_bias", "mlp_bias", "bias")
    text = model.config.get_text_config()
    field = next((name for name in fields if getattr(text, name, None) is False), None)
    if field is None:
        return f"{type(model).__name__} is not the architecture that was saved"
    return f'if the model was trained with biases, set "{field}": true in {CONFIG_FILE}'


def check_names(path: Path, base: str, keys: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for a weight with two names, one of which would be ignored."""
    for key in keys:
        if key.startswith(f"{base}.") and key.removeprefix(f"{base}.") in keys:
            raise CheckpointError(
                f"{path} has {key} and {key.removeprefix(f'{base}.')}, two names of one weight",
                hint="save the weights under one name",
            )


def _unnumbered(key: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", key)


def check_experts(path: Path, keys: Iterable[str]) -> None:
    """Raises `CheckpointError` for an expert with a missing weight."""
    numbers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for key in keys:
        match = NUMBERED.match(key)
        if match is not None:
            numbers[match[1]][match[3]].add(int(match[2]))
    for layer, kinds in numbers.items():
        count = max(max(present) for present in kinds.values()) + 1
        for kind, present in kinds.items():
            gone = sorted(set(range(count)) - present)
            if gone:
                raise CheckpointError(
                    f"{path}: {layer}{gone[0]}{kind} is missing, but {len(present)} other experts "
                    "have theirs",
                    hint=ALL_EXPERTS,
                )


def check_missing(path: Path, model: Any, report: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if the files lack weights of the network."""
    missing = sorted(report["missing_keys"])
    if not missing:
        return
    layer = LAYER.match(missing[0])
    if any(re.search(r"(^|\.)(lm_head|score|classifier)\.", key) for key in missing):
        hint = (
            f'set "architectures" in {CONFIG_FILE} to the class that was saved; if the head shares '
            'the weights of the embedding, set "tie_word_embeddings": true'
        )
    elif layer is not None and _whole_layers(model, missing):
        hint = f"{CONFIG_FILE} describes more layers than the weights have, or different ones"
    else:
        hint = _SAVED_SEPARATELY
    raise CheckpointError(
        f"{path}: {len(missing)} weights are missing, the first is {missing[0]}", hint=hint
    )


def _whole_layers(model: Any, missing: Sequence[str]) -> bool:
    """Returns whether the missing weights are exactly the weights of some layers."""
    layers = {match[0] for key in missing if (match := LAYER.match(key)) is not None}
    within = [key for key in model.state_dict() if key.startswith(tuple(layers))]
    return set(within) == set(missing)


def check_mismatched(path: Path, model: Any, report: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for weights whose shapes differ from the configuration's."""
    mismatched = sorted(report.get("mismatched_keys") or (), key=str)
    if not mismatched:
        return
    key, saved, expected = mismatched[0]
    text, hint = model.config.get_text_config(), MISMATCH
    if len(saved) == len(expected) and saved[1:] == expected[1:]:
        field = next(
            (name for name in ("vocab_size", *EXPERTS) if getattr(text, name, None) == expected[0]),
            None,
        )
        if field is not None:
            hint = f'set "{field}": {saved[0]} in {CONFIG_FILE} if the model was saved this way'
        siblings = {name for name in model.state_dict() if _unnumbered(name) == _unnumbered(key)}
        if field in EXPERTS and siblings - {name for name, *_ in mismatched}:
            hint = ALL_EXPERTS  # other layers have all their experts
    raise CheckpointError(
        f"{path}: {key} is {list(saved)}, but {CONFIG_FILE} requires {list(expected)}", hint=hint
    )
