"""Further calls of a layer that an adapter must match: other scales, weights and sizes.

A limit or a mask in a layer's forward may change nothing for usual inputs and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ....errors import UsageError
from ..calls import LayerCall
from .coverage import WatchedForward
from .forms import Guess
from .readings import call_of, resized
from .request import TriedSizes

SCALES = ((0.1, 1.0), (10.0, 1.0), (100.0, 1.0), (1.0, 10.0), (1.0, 100.0))
"""Factors of the inputs, and of the parameters outside the experts."""

MAX_ERROR = 1e-3
"""The largest accepted error of a text, as a share of max|y|, beyond the effect of rounding."""

NOISE, NOISE_FACTOR = 2e-7, 30
"""Changes of inputs that imitate rounding, and the multiple of their effect that is accepted."""

UNSTABLE = 0.01
"""Results that rounding changes by more than this share are not compared."""


@dataclass(frozen=True, slots=True)
class FurtherCall:
    """A call that a text must match: in words, with a factor of the weights and a tolerance."""

    words: str
    weights: float
    call: LayerCall
    allowed: Tensor


Planned = tuple[str, float, tuple[Tensor, ...], bool]
"""A call in words, the factor of the weights, the arguments, and whether it must succeed."""


class FurtherCalls:
    """The further calls of a guess that its layer accepts."""

    def __init__(self, guess: Guess, sizes: TriedSizes, watched: WatchedForward) -> None:
        self._guess, self._watched = guess, watched
        calls = (*self._scaled(), *self._resized(sizes))
        self._calls = [further for call in calls if (further := self._call(*call)) is not None]

    def mismatch(self, text: str) -> tuple[str, float] | None:
        """Returns the first call that a text does not match, in words, and the text's error."""
        for further in self._calls:
            self._guess.count.report(f"comparing an adapter for {further.words}")
            with self._scaled_weights(further.weights):
                ours = self._guess.result(self._guess.describe(text), further.call)
            y = further.call.y
            if ours is None or ours.shape != y.shape:
                return f"{further.words}, for which it fails", float("inf")
            off = _errors(y, ours)
            beyond = off - further.allowed
            if bool((beyond > MAX_ERROR).any()) or not bool(ours.isfinite().all()):
                return further.words, float(off[beyond.argmax()])
        return None

    @contextmanager
    def _scaled_weights(self, factor: float) -> Iterator[None]:
        """Scales the layer's parameters within the context, except those of its experts."""
        own = self._guess.reading.own
        old = [(p, p.detach().clone()) for p in self._guess.layer.parameters() if id(p) not in own]
        try:
            with torch.no_grad():
                for p, _ in old:
                    p.mul_(factor)
            yield
        finally:
            with torch.no_grad():
                for p, values in old:
                    p.copy_(values)

    def _scaled(self) -> Iterator[Planned]:
        base = self._guess.call
        for inputs, weights in SCALES:
            words = f"inputs {inputs:g} times as large"
            if weights != 1.0:
                words = f"weights around the experts {weights:g} times as large"
            yield words, weights, (base.x * inputs, *base.extra_args), False

    def _resized(self, sizes: TriedSizes) -> Iterator[Planned]:
        base, compared = self._guess.call, [size + 1 for size in self._watched.sizes()]
        pairs: list[tuple[int, int | None]] = [(b, None) for b in (*sizes.batches[1:], *compared)]
        if base.x.ndim == 3:
            pairs += [(len(base.x), m) for m in (*sizes.tokens[1:], *compared)]
        for batch, tokens in dict.fromkeys(pairs):
            words = f"a batch of {batch}"
            required = sizes.required_batches and batch in sizes.batches
            if tokens is not None:
                words = f"{tokens} tokens"
                required = sizes.required_tokens and tokens in sizes.tokens
            yield words, 1.0, resized(base, batch, tokens), required

    def _call(
        self, words: str, weights: float, args: tuple[Tensor, ...], required: bool
    ) -> FurtherCall | None:
        """Returns a call of the layer and the effect of rounding; None if the call fails.

        Raises UsageError if a `required` call fails.
        """
        self._guess.count.report(f"calling it with {words}")
        generator = torch.Generator().manual_seed(3)
        layer, x = self._guess.layer, args[0]
        with self._scaled_weights(weights):
            try:
                with self._watched.recording():
                    call = call_of(layer, args)
                noise = torch.zeros(len(call.y))
                for _ in range(2):
                    factors = 1 + NOISE * torch.randn(x.shape, generator=generator)
                    near = call_of(layer, (x * factors, *args[1:]))
                    noise = torch.maximum(noise, _errors(call.y, near.y))
            except Exception as error:  # the user's code may fail in any way
                if not required:
                    return None
                raise UsageError(
                    f"{self._guess.source}: its forward fails, or returns NaN, for {words}",
                    hint="give --batch and --tokens sizes that the layer accepts",
                ) from error
        allowed = torch.where(noise > UNSTABLE, torch.inf, NOISE_FACTOR * noise)
        return FurtherCall(words, weights, call, allowed)


def _errors(expected: Tensor, actual: Tensor) -> Tensor:
    """Returns the error of each input's result, as a share of that result's largest value."""
    flat = expected.flatten(1) if expected.ndim > 1 else expected[:, None]
    off = (flat - actual.reshape(flat.shape)).abs().amax(1)
    return off / flat.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
