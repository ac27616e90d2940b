"""Language models in a benchmark: windows of tokens, and the calls that are timed.

A prefill computes a whole prompt. A decode computes the token after it, with the keys and values of
the prompt in the cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...bench.data import LabelledData, several_inputs
from ...bench.measure.sequences import SequenceBenchmark
from ...bench.plan import Phase
from ...bench.runners.base import first_of
from ...bench.runners.pytorch import PyTorch
from ...common.locations import local
from ...data.arrays import npy_array
from ...data.batches import IGNORED, Array, Labels
from ...errors import FeedError, UsageError, one_line
from ...exporter.inputs import Inputs, fitted
from ...exporter.model import Model
from ...graphs.names import PAST, PRESENT
from ..token_routed.network import TransformersNetwork

API = 1

PROMPT = 128
"""The default number of tokens of a prompt."""

WINDOWS = 32
"""The number of windows of Python's help, enough for a perplexity accurate to a few percent."""

RANDOM_WINDOWS = 8

TEXT_BYTES = 64 << 20
"""The largest size of a text, whose tokenisation takes a hundred times this memory."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
"""The files that a folder with a tokenizer contains at least one of."""


def prompt_of(model: Model, tokens: int | None) -> int:
    """Returns the number of tokens of a prompt.

    Raises `UsageError` if the prompt and one more token exceed the model's positions.
    """
    assert isinstance(model.module, TransformersNetwork)
    config = model.module.wrapped.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if tokens is None:
        return PROMPT if positions is None else max(1, min(PROMPT, positions - 1))
    if positions is not None and tokens >= positions:
        raise UsageError(
            f"--tokens {tokens}: the model has only {positions} positions, and one more token "
            "follows the prompt",
            hint=f"use at most --tokens {positions - 1}",
        )
    return tokens


def phases_of(model: Model, tokens: int | None, length: int) -> tuple[Phase, ...]:
    """Returns the timed calls of a language model; without a cache there is no decode.

    The prompt has `tokens` tokens, or fewer if it and one more token exceed `length`.
    """
    prompt = min(prompt_of(model, tokens), length - 1)
    prefill = Phase("prefill", prompt)
    assert isinstance(model.module, TransformersNetwork)
    return (Phase("decode", 1, prompt), prefill) if model.module.cached else (prefill,)


def token_windows(data: str | Path | Array | None, model: Model, prompt: int) -> LabelledData:
    """Returns windows [s, prompt + 1] of token ids for a perplexity.

    `data` is a text file, an `.npz` with `input_ids` [s, m] or a `.npy` of ids [tokens] or [s, m].
    None selects the text that ships with Python if the model's folder has a tokenizer, and
    otherwise random ids, whose perplexity is meaningless. Raises `FeedError` for anything else.
    """
    length, name = prompt + 1, model.input.name
    if data is None:
        tokenizer = _tokenizer(local(model.source.path))
        if tokenizer is None:
            random = np.random.default_rng(0)
            ids = random.integers(0, model.input.below or 1, (RANDOM_WINDOWS, length))
            return LabelledData(ids, np.full_like(ids, IGNORED), name)
        text = "\n\n".join(python_topics())
        return _windows(_ids(tokenizer, text)[: WINDOWS * length], model, length, "Python's text")
    if isinstance(data, np.ndarray):
        return _windows(data, model, length, "the ids")
    path = local(data)
    if not path.is_file():
        raise FeedError(
            f"{path}: no such file",
            hint="a language model is measured on a text file, an .npz with 'input_ids', or an "
            ".npy of token ids",
        )
    if path.suffix == ".npz":
        return _archived(path, model)
    if path.suffix == ".npy":
        return _windows(npy_array(path.read_bytes(), str(path)), model, length, str(path))
    return _windows(_text_ids(path, model), model, length, str(path))


def _text_ids(path: Path, model: Model) -> Array:
    tokenizer = _tokenizer(local(model.source.path))
    if tokenizer is None:
        raise FeedError(
            f"{path} is text, but {model.source.path} has no tokenizer",
            hint="copy tokenizer.json into the folder, or use token ids: an .npz with 'input_ids'",
        )
    if path.stat().st_size > TEXT_BYTES:
        raise FeedError(
            f"{path} has more than {TEXT_BYTES} bytes, the limit for a text",
            hint="shorten it, or use token ids: an .npz with 'input_ids'",
        )
    try:
        return _ids(tokenizer, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise FeedError(f"{path} is not UTF-8 text", hint="use text, .npz or .npy") from error


def _tokenizer(folder: Path) -> Any:
    """Returns the tokenizer in a model's folder, or None; never runs code from the folder."""
    folder = folder if folder.is_dir() else folder.parent
    if not any((folder / file).is_file() for file in TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # loading a tokenizer may raise anything
        raise FeedError(
            f"{folder}: transformers cannot load its tokenizer: {one_line(error)}",
            hint="use token ids: --data ids.npz with 'input_ids'",
        ) from error


def _ids(tokenizer: Any, text: str) -> Array:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, np.int64)


def _windows(ids: Array, model: Model, length: int, where: str) -> LabelledData:
    """Cuts token ids [tokens] into windows; keeps windows [s, m] unchanged."""
    if ids.ndim == 1:
        if len(ids) < length:
            raise FeedError(
                f"{where}: {len(ids)} tokens, but a prompt and the token after it need {length}",
                hint="use a longer text or a smaller --tokens",
            )
        ids = ids[: len(ids) // length * length].reshape(-1, length)
    return LabelledData(_sequences_in(fitted(ids, model.input), where), None, model.input.name)


def _sequences_in(ids: Array, where: str) -> Array:
    """Returns ids [s, m] unchanged; raises `FeedError` for sequences of single tokens."""
    if ids.shape[1] < 2:
        raise FeedError(
            f"{where}: single tokens have no next token to predict", hint="use longer sequences"
        )
    return ids


def _archived(path: Path, model: Model) -> LabelledData:
    """Reads the ids of an `.npz`; if it has no labels, its mask excludes tokens."""
    data = several_inputs(path, model)
    mask = data.others.get("attention_mask")
    labels = data.labels
    if labels is None and mask is not None:
        labels = targets_of(data.inputs, mask)
    return replace(data, inputs=_sequences_in(data.inputs, str(path)), labels=labels)


def targets_of(ids: Array, mask: Array) -> Labels:
    """Returns the next id at each position [s, m], where the mask includes both tokens."""
    targets = np.full_like(ids, IGNORED)
    both = (mask[:, :-1] != 0) & (mask[:, 1:] != 0)
    targets[:, :-1] = np.where(both, ids[:, 1:], IGNORED)
    return targets


def python_topics() -> list[str]:
    """Returns the topics of this Python's `pydoc`, in ASCII, sorted by name.

    The text depends on the version of Python, so figures differ a little between versions.
    """
    from pydoc_data.topics import topics

    return [topics[name].encode("ascii", "replace").decode() for name in sorted(topics)]


def phase_inputs(phase: Phase, x: Inputs, base: PyTorch) -> dict[str, Array]:
    """Returns the inputs of a call for windows [b, m]: the prompt, or what follows and its cache.

    The untouched model computes the cache, so it is the same in all measurements.
    """
    ids, (name, *_) = first_of(x), (spec.name for spec in base.ports)
    mask = None if isinstance(x, np.ndarray) else x.get("attention_mask")
    prompt = _cut(name, ids, mask, 0, phase.past or phase.tokens)
    if not phase.past:
        return prompt
    assert isinstance(base.module, TransformersNetwork)
    outputs = zip(base.module.outputs, base.outputs(prompt), strict=True)
    cache = {n.replace(PRESENT, PAST): array for n, array in outputs if PRESENT in n}
    return _cut(name, ids, mask, phase.past, phase.past + phase.tokens) | cache


def _cut(name: str, ids: Array, mask: Array | None, start: int, end: int) -> dict[str, Array]:
    part = {name: np.ascontiguousarray(ids[:, start:end])}
    return part if mask is None else part | {"attention_mask": np.ascontiguousarray(mask[:, :end])}


LANGUAGE = SequenceBenchmark(
    "language",
    data=lambda data, model, tokens: token_windows(data, model, prompt_of(model, tokens)),
    phases=phases_of,
    inputs=phase_inputs,
)
"""How a benchmark measures language models."""
