"""A model of `transformers` as a network of plain tensors: named inputs in, named outputs out.

A causal language model with a cache takes the keys and values of earlier tokens as inputs and
returns those of all tokens, by the names that other exporters to ONNX have for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...exporter.model import TensorSpec
from ...graphs.names import PAST, PRESENT

TOKENS = ("batch", "tokens")

ENCODED, ENCODED_MASK = "encoder_hidden_states", "encoder_attention_mask"
"""What a decoder alone takes of its encoder, and which of that counts."""

DECODED = "decoder_input_ids"


class TransformersNetwork(nn.Module):
    """A model of `transformers` that takes a tensor for each name of `takes`.

    Its modules have the paths that they have in the model itself. `gives` names what is returned:
    a field of the model's output, or a key or value of its cache. `loops`: the model runs over its
    tokens in a loop, which a trace unrolls.
    """

    def __init__(
        self, model: nn.Module, takes: Sequence[str], gives: Sequence[str], *, loops: bool = False
    ) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._wrapped = (model,)  # in a tuple, so that no module is found twice
        self.takes, self.gives, self.loops = tuple(takes), tuple(gives), loops

    @property
    def wrapped(self) -> Any:
        """The model itself."""
        return self._wrapped[0]

    @property
    def cached(self) -> bool:
        """Whether keys and values of earlier tokens go in and out."""
        return any(name.startswith(PAST) for name in self.takes)

    def forward(self, *tensors: Tensor) -> Any:
        """Returns a tensor for each name of `gives`; for a single one the tensor itself."""
        results = self.wrapped(**self.arguments(tensors))
        outputs = tuple(self._output(results, name) for name in self.gives)
        return outputs if len(outputs) > 1 else outputs[0]

    def arguments(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Returns the arguments of the model's own forward for a tensor of each of `takes`."""
        from transformers import DynamicCache, EncoderDecoderCache

        by_name = dict(zip(self.takes, tensors, strict=True))
        arguments: dict[str, Any] = {n: t for n, t in by_name.items() if not n.startswith(PAST)}
        decodes = ENCODED in arguments
        if decodes:
            arguments["encoder_outputs"] = encoded(arguments.pop(ENCODED))
            arguments["attention_mask"] = arguments.pop(ENCODED_MASK)
        if self.cached:
            pairs = [
                (by_name[f"{PAST}.{layer}.key"], by_name[f"{PAST}.{layer}.value"])
                for layer in range(sum(name.startswith(PAST) for name in by_name) // 2)
            ]
            # Without a config every layer keeps all that it is given: a sliding window is a matter
            # of the mask then, as it is in the graph.
            cache = DynamicCache(pairs)
            # Keys and values of what the encoder gave are computed anew: they are no part of it.
            arguments[PAST] = EncoderDecoderCache(cache, DynamicCache()) if decodes else cache
        arguments["use_cache"] = self.cached
        return arguments

    def _output(self, results: Any, name: str) -> Tensor:
        if not name.startswith(PRESENT):
            return results[name]  # type: ignore[no-any-return]
        _, layer, part = name.split(".")
        of = self_attention(results[PAST]).layers[int(layer)]
        return of.keys if part == "key" else of.values  # type: ignore[no-any-return]


def encoded(hidden: Tensor) -> Any:
    """Returns what an encoder gave as a model of `transformers` takes it."""
    from transformers.modeling_outputs import MoEModelOutput

    return MoEModelOutput(last_hidden_state=hidden)


def self_attention(cache: Any) -> Any:
    """Returns the part of a cache that holds earlier tokens: all of it, but for a decoder's."""
    return getattr(cache, "self_attention_cache", cache)


def token_specs(vocabulary: int, positions: int | None, *, cached: bool) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a model of tokens, without those of a cache."""
    # With a cache the bound is of both, past and new tokens.
    limits = {} if positions is None or cached else {"tokens": positions}
    ids = TensorSpec("input_ids", "int64", TOKENS, limits, below=vocabulary)
    seen = "past + tokens" if cached else "tokens"
    mask = TensorSpec("attention_mask", "int64", ("batch", seen), default="ones")
    if not cached:
        return ids, mask
    return ids, mask, TensorSpec("position_ids", "int64", TOKENS, default="positions")


def decoder_specs(vocabulary: int, hidden: int) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a decoder alone, without those of a cache."""
    return (
        TensorSpec(DECODED, "int64", TOKENS, below=vocabulary),
        TensorSpec(ENCODED, "float32", ("batch", "encoder_tokens", hidden)),
        TensorSpec(ENCODED_MASK, "int64", ("batch", "encoder_tokens"), default="ones"),
    )


def cache_shapes(past: Any) -> dict[str, tuple[int, int]] | None:
    """Returns what `model.cache_specs` takes, from the cache that a model returned for some tokens.

    None where a layer keeps anything else than keys and values of every token: states of a
    convolution, the keys of an indexer.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = self_attention(past)
    if type(cache) is not DynamicCache:
        return None
    shapes: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return None  # what extends them holds more
        for part in ("key", "value"):
            held = getattr(layer, f"{part}s", None)
            if not isinstance(held, torch.Tensor) or held.ndim != 4:
                return None
            shapes[f"{index}.{part}"] = (held.shape[1], held.shape[3])
    return shapes or None
