"""How often a graph chooses each expert: the histogram that an export records for its data.

A layer that keeps all of its experts chooses nothing, so it has no histogram.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...data.batches import Fields
from ...errors import BundleError
from ..bundle.manifest import GraphRecord, Manifest
from ..bundle.parity import Reference, has_coefficients
from ..session import Session

CHOICES = "choices"
"""The key of the histogram among the `answers` of a manifest."""


def real_tokens(inputs: Fields, rows: int, tokens: int) -> np.ndarray | None:
    """Returns the tokens [rows, tokens] that a mask among the inputs keeps; None without a mask."""
    if any(name.startswith(("encoder", "decoder")) for name in inputs):
        return None  # the tokens belong to two texts
    masks = [array for name, array in inputs.items() if name.endswith("mask") and array.ndim == 2]
    fitting = [mask[:, -tokens:] != 0 for mask in masks if len(mask) == rows]
    return next((mask for mask in fitting if mask.shape == (rows, tokens)), None)


def by_input(
    chosen: np.ndarray, rows: int, experts: int, inputs: Fields
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns how often each input chose each expert, [rows, n], and how many it lost, [rows].

    `chosen` are indices, or the coefficients of all experts, whose sums are returned. A choice that
    exceeds an expert's capacity is lost, but still counted. None if every token chooses every
    expert, or if choices do not belong to single inputs.
    """
    if not rows or len(chosen) % rows:
        return None
    by_token = chosen.reshape(rows, -1, chosen.shape[-1])
    mask = real_tokens(inputs, rows, by_token.shape[1])
    real = np.ones((*by_token.shape[:2], 1), bool) if mask is None else mask[..., None]
    if has_coefficients(chosen):
        return (by_token * real).sum(axis=1, dtype=np.float64), np.zeros(rows)
    if by_token.shape[2] >= experts:
        return None
    counted = np.broadcast_to(real, by_token.shape)
    counts = np.zeros((rows, experts))
    row = np.broadcast_to(np.arange(rows)[:, None, None], by_token.shape)
    np.add.at(counts, (row[counted], by_token[counted] % experts), 1)
    return counts, ((by_token >= experts) & counted).sum(axis=(1, 2)).astype(np.float64)


def deviations(counts: np.ndarray) -> np.ndarray:
    """Returns each input's contribution to each expert's excess share, from counts [s, n].

    Their variance is the noise of the shares: tokens of one input are not independent draws.
    """
    totals = counts.sum(axis=1)
    shares = counts.sum(axis=0) / max(1.0, totals.sum())
    result: np.ndarray = (counts - totals[:, None] * shares) / max(1.0, totals.mean())
    return result


@dataclass(frozen=True, slots=True)
class ChoiceHistogram:
    """A layer's entry in a manifest: for `inputs` inputs the counts and the spread, both [n]."""

    inputs: int
    counts: np.ndarray
    spread: np.ndarray


@dataclass(slots=True)
class Choices:
    """The choices of a graph's layers by name: for each input, [s, n]."""

    counts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)

    def add(self, choice: str, counts: np.ndarray, lost: np.ndarray) -> None:
        self.counts.setdefault(choice, []).append(counts)
        self.lost[choice] = self.lost.get(choice, 0.0) + float(lost.sum())

    def of(self, choice: str) -> np.ndarray:
        """Returns how often each input chose each expert of a layer, [s, n]."""
        return np.concatenate(self.counts[choice])

    def record(self) -> dict[str, Any]:
        """Returns the entry in a manifest.

        `counts` [n] are those of all inputs, and `spread` [n] is the standard deviation of single
        inputs' contributions to the share of each expert (`deviations`).
        """
        layers: dict[str, Any] = {}
        for choice in self.counts:
            counts = self.of(choice).sum(axis=0)
            integral = np.array_equal(counts, counts.round())
            listed = [int(n) if integral else round(float(n), 4) for n in counts]
            spread = np.sqrt((deviations(self.of(choice)) ** 2).mean(axis=0))
            layers[choice] = {
                "inputs": len(self.of(choice)),
                "counts": listed,
                "spread": [round(float(value), 5) for value in spread],
            }
            if self.lost[choice]:
                layers[choice]["dropped"] = int(self.lost[choice])
        return {"layers": layers}


def choices_of(
    session: Session,
    manifest: Manifest,
    graph: GraphRecord,
    batches: Iterable[Fields],
    k: int | None,
) -> Choices:
    """Runs a graph that outputs its choices on batches of inputs, and returns the choices.

    `k` is the number of experts if k is an input of the graph.
    """
    experts = manifest.experts
    found = Choices()
    for x in batches:
        rows = len(next(iter(x.values())))
        values = session.run(x, k)
        for choice, value in graph.selected.items():
            counted = by_input(values[value], rows, experts.get(choice, 0), x)
            if counted is not None:
                found.add(choice, *counted)
    return found


def chosen_k(manifest: Manifest, expected: Reference) -> int | None:
    """Returns the k for counting choices, the one of the comparison, if k is an input."""
    return expected.main_k if manifest.k == "input" else None


def recorded_histograms(answers: Mapping[str, Any]) -> dict[str, ChoiceHistogram] | None:
    """Returns the histograms of a manifest, by choice.

    None if an export recorded none. Raises `BundleError` for invalid ones.
    """
    if CHOICES not in answers:
        return None
    try:
        found = {
            choice: ChoiceHistogram(
                int(layer["inputs"]),
                np.array(layer["counts"], np.float64),
                np.array(layer["spread"], np.float64),
            )
            for choice, layer in answers[CHOICES]["layers"].items()
        }
        valid = all(
            layer.inputs > 0
            and layer.counts.ndim == 1
            and layer.counts.shape == layer.spread.shape
            and (layer.counts >= 0).all()
            and (layer.spread >= 0).all()
            and 0 < layer.counts.sum() < np.inf
            for layer in found.values()
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        valid = False
    if not valid:
        raise BundleError(
            f"manifest.json: '{CHOICES}' is not a histogram", hint="export the bundle again"
        )
    return found
