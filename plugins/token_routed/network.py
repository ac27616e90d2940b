"""A `transformers` model as a network whose inputs and outputs are named tensors.

A causal language model with a cache takes the keys and values of earlier tokens as inputs and
returns those of all tokens, under the names that other exporters to ONNX use.
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
"""The inputs of a decoder without its encoder: the encoder's output and its mask."""

DECODED = "decoder_input_ids"


class TransformersNetwork(nn.Module):
    """A `transformers` model that takes a tensor for each of `inputs`.

    Its modules have the same paths as in the model itself. Each of `outputs` is a field of the
    model's output, or a key or value of its cache. `loops`: the model loops over its tokens, and a
    trace unrolls the loop.
    """

    def __init__(
        self, model: nn.Module, inputs: list[str], outputs: list[str], *, loops: bool = False
    ) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._wrapped = (model,)  # in a tuple, so that modules are not found twice
        self.inputs, self.outputs, self.loops = tuple(inputs), tuple(outputs), loops

    @property
    def wrapped(self) -> Any:
        return self._wrapped[0]

    @property
    def cached(self) -> bool:
        """Whether keys and values of earlier tokens are inputs and outputs."""
        return any(name.startswith(PAST) for name in self.inputs)

    def forward(self, *tensors: Tensor) -> Any:
        """Returns a tuple of a tensor for each of `outputs`, or the tensor if there is one."""
        results = self.wrapped(**self.arguments(tensors))
        outputs = tuple(self._output(results, name) for name in self.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    def arguments(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Returns the arguments of the model's own forward for the tensors of `inputs`."""
        from transformers import DynamicCache, EncoderDecoderCache

        by_name = dict(zip(self.inputs, tensors, strict=True))
        arguments: dict[str, Any] = {n: t for n, t in by_name.items() if not n.startswith(PAST)}
        is_decoder = ENCODED in arguments
        if is_decoder:
            arguments["encoder_outputs"] = encoded(arguments.pop(ENCODED))
            arguments["attention_mask"] = arguments.pop(ENCODED_MASK)
        if self.cached:
            pairs = [
                (by_name[f"{PAST}.{layer}.key"], by_name[f"{PAST}.{layer}.value"])
                for layer in range(sum(name.startswith(PAST) for name in by_name) // 2)
            ]
            # Without a config every layer keeps all keys and values, and the mask implements a
            # sliding window, as in the graph.
            cache = DynamicCache(pairs)
            # Keys and values of the encoder's output are not in the cache but computed again.
            arguments[PAST] = EncoderDecoderCache(cache, DynamicCache()) if is_decoder else cache
        arguments["use_cache"] = self.cached
        return arguments

    def _output(self, results: Any, name: str) -> Tensor:
        if not name.startswith(PRESENT):
            return results[name]  # type: ignore[no-any-return]
        _, layer, part = name.split(".")
        past = self_attention(results[PAST]).layers[int(layer)]
        return past.keys if part == "key" else past.values  # type: ignore[no-any-return]


def encoded(hidden: Tensor) -> Any:
    """Returns an encoder's output in the form that a `transformers` model takes."""
    from transformers.modeling_outputs import MoEModelOutput

    return MoEModelOutput(last_hidden_state=hidden)


def self_attention(cache: Any) -> Any:
    """Returns the self-attention part of a decoder's cache, or the whole of any other cache."""
    return getattr(cache, "self_attention_cache", cache)


def token_specs(vocabulary: int, positions: int | None, *, cached: bool) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a model of tokens, without those of a cache."""
    # With a cache the limit applies to past and new tokens together.
    limits = {} if positions is None or cached else {"tokens": positions}
    ids = TensorSpec("input_ids", "int64", TOKENS, limits, below=vocabulary)
    axis = "past + tokens" if cached else "tokens"
    mask = TensorSpec("attention_mask", "int64", ("batch", axis), default="ones")
    if not cached:
        return ids, mask
    return ids, mask, TensorSpec("position_ids", "int64", TOKENS, default="positions")


def decoder_specs(vocabulary: int, hidden: int) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a decoder without its encoder, without those of a cache."""
    return (
        TensorSpec(DECODED, "int64", TOKENS, below=vocabulary),
        TensorSpec(ENCODED, "float32", ("batch", "encoder_tokens", hidden)),
        TensorSpec(ENCODED_MASK, "int64", ("batch", "encoder_tokens"), default="ones"),
    )


def cache_shapes(past: Any) -> dict[str, tuple[int, int]] | None:
    """Returns the argument of `cache_specs`, from the cache that a model returned.

    Returns None if a layer keeps something other than the keys and values of every token, such as
    states of a convolution or the keys of an indexer.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = self_attention(past)
    if type(cache) is not DynamicCache:
        return None
    shapes: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return None  # subclasses contain more
        for part in ("key", "value"):
            values = getattr(layer, f"{part}s", None)
            if not isinstance(values, torch.Tensor) or values.ndim != 4:
                return None
            shapes[f"{index}.{part}"] = (values.shape[1], values.shape[3])
    return shapes or None
