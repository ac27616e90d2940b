"""How good a contestant is: accuracy, routing agreement and parity, as sums over batches.

Each sum is a frozen value that adds up, so an evaluation streams over its data, and parts of one
may be computed apart and added. Nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..errors import FeedError, ParityError
from .bench_data import Array, Labels
from .results import Accuracy, Parity, RoutingAgreement
from .statistics import paired_ratio, wilson

TOP = 5


@dataclass(frozen=True, slots=True)
class Hits:
    """Samples classified right, of those seen.

    `among` counts those whose class is among the five best scores, None for five classes or fewer;
    `both` those that the untouched model has right too, None where it was not asked.
    """

    right: int = 0
    seen: int = 0
    among: int | None = None
    both: int | None = None

    @classmethod
    def of(cls, outputs: Array, labels: Labels, untouched: Array | None = None) -> Self:
        """Counts over class scores [b, classes] and labels [b], beside the untouched scores.

        Raises FeedError for outputs that are not class scores.
        """
        outputs = one_per_sample(outputs)
        if outputs.ndim != 2:
            raise FeedError(
                f"accuracy needs outputs of shape (batch, classes), and the model gives "
                f"{outputs.ndim} axes: {outputs.shape}",
                hint="leave the labels out to measure latency, routing and parity only",
            )
        if len(outputs) != len(labels):
            raise FeedError(f"{len(outputs)} outputs for {len(labels)} labels")
        right = outputs.argmax(axis=1) == labels
        among = None
        if outputs.shape[1] > TOP:
            best = np.argpartition(outputs, -TOP, axis=1)[:, -TOP:]
            among = int((best == labels[:, None]).any(axis=1).sum())
        both = None
        if untouched is not None:
            both = int((right & (one_per_sample(untouched).argmax(axis=1) == labels)).sum())
        return cls(int(right.sum()), len(labels), among, both)

    def __add__(self, other: Hits) -> Hits:
        if not (self.seen and other.seen):
            return self if self.seen else other
        return Hits(
            self.right + other.right,
            self.seen + other.seen,
            _sum(self.among, other.among),
            _sum(self.both, other.both),
        )

    def accuracy(self, untouched: Hits) -> Accuracy:
        """Top-1 and top-5, and what top-1 is of the untouched model's on the same samples."""
        top1 = self.right / self.seen
        base = untouched.right / untouched.seen
        among = self.among
        return Accuracy(
            top1,
            top1 / base if base > 0 else None,
            self.seen,
            top5=None if among is None else among / self.seen,
            top1_interval=wilson(self.right, self.seen),
            top5_interval=None if among is None else wilson(among, self.seen),
            retention_interval=None
            if self.both is None
            else paired_ratio(self.right, untouched.right, self.both),
        )


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def one_per_sample(outputs: Array) -> Array:
    """Returns scores [b, 1, classes] as [b, classes]: a muMoE head takes a vector for a token."""
    return outputs[:, 0] if outputs.ndim == 3 and outputs.shape[1] == 1 else outputs


@dataclass(frozen=True, slots=True)
class Overlap:
    """Agreement of chosen sets: summed Jaccard over samples and layers, samples equal in all."""

    jaccard: float = 0.0
    pairs: int = 0
    exact: int = 0
    samples: int = 0

    @classmethod
    def of(cls, chosen: Mapping[str, Array], reference: Mapping[str, Array]) -> Self:
        """Compares the experts chosen per layer, each [b, k], with the reference's.

        Raises ParityError when the layers are not the same or the sets are of different size.
        """
        if chosen.keys() != reference.keys():
            raise ParityError(
                f"routing of layers {sorted(chosen)} cannot be compared with {sorted(reference)}"
            )
        jaccards = []
        for name, expected in reference.items():
            if chosen[name].shape != expected.shape:
                raise ParityError(
                    f"layer {name}: chosen experts have shape {chosen[name].shape}, "
                    f"the reference's {expected.shape}"
                )
            jaccards.append(jaccard(chosen[name], expected))
        table = np.stack(jaccards)  # [layers, b]
        samples = table.shape[1]
        return cls(float(table.sum()), table.size, int((table == 1).all(axis=0).sum()), samples)

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(
            self.jaccard + other.jaccard,
            self.pairs + other.pairs,
            self.exact + other.exact,
            self.samples + other.samples,
        )

    def agreement(self) -> RoutingAgreement:
        """The mean Jaccard index and the share of samples that agree in every layer."""
        return RoutingAgreement(self.jaccard / self.pairs, self.exact / self.samples)


def jaccard(chosen: Array, reference: Array) -> Array:
    """Returns |A∩B| / |A∪B| of the sets in each row: [b, k], [b, k] to [b]; order is ignored."""
    common = (chosen[:, :, None] == reference[:, None, :]).any(axis=2).sum(axis=1)
    shares: Array = common / (chosen.shape[1] + reference.shape[1] - common)
    return shares


@dataclass(frozen=True, slots=True)
class Closeness:
    """Sums from which the largest difference and the cosine of all outputs follow."""

    max_abs: float = 0.0
    dot: float = 0.0
    squares: float = 0.0
    reference_squares: float = 0.0

    @classmethod
    def of(cls, outputs: Array, reference: Array) -> Self:
        """Compares outputs of one batch. Raises ParityError for other shapes, NaN or Inf."""
        if outputs.shape != reference.shape:
            raise ParityError(
                f"outputs have shape {outputs.shape}, the PyTorch reference's {reference.shape}"
            )
        a, b = outputs.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
        if not np.isfinite(a).all():
            raise ParityError(f"{int((~np.isfinite(a)).sum())} of {a.size} outputs are not finite")
        return cls(float(np.abs(a - b).max()), float(a @ b), float(a @ a), float(b @ b))

    def __add__(self, other: Closeness) -> Closeness:
        return Closeness(
            max(self.max_abs, other.max_abs),
            self.dot + other.dot,
            self.squares + other.squares,
            self.reference_squares + other.reference_squares,
        )

    def parity(self) -> Parity:
        """The largest absolute difference and the cosine; two zero outputs have cosine 1."""
        norm = float(np.sqrt(self.squares * self.reference_squares))
        if norm == 0:
            return Parity(self.max_abs, 1.0 if self.max_abs == 0 else 0.0)
        return Parity(self.max_abs, self.dot / norm)
