"""A loaded model: a PyTorch module with MoE layers, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..graphs.layers.base import MoELayer, moe_layers
from .edits import NO_EDITS, Edits

Dimension = int | str
"""A fixed size, or the name of a dynamic axis (`batch`, `tokens`, `height`, `width`)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, numpy dtype name and shape of a graph input or output.

    `limits` are the largest sizes that named axes may have; `below` is the bound of an integer
    input's values. `implied` names an axis that arrays may leave out: it is of size 1 there.
    """

    name: str
    dtype: str
    shape: tuple[Dimension, ...]
    limits: tuple[tuple[str, int], ...] = ()
    below: int | None = None
    implied: str | None = None

    @property
    def dynamic_axes(self) -> tuple[str, ...]:
        """Names of the dynamic axes, in order."""
        return tuple(size for size in self.shape if isinstance(size, str))

    def concrete(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape with each dynamic axis replaced by its size in `sizes`."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model came from: its files, or the factory that built it and its `weights`.

    `mapped` are the files that its weights may be mapped from: those, and one of converted weights.
    """

    path: str
    files: tuple[Path, ...]
    weights: str | None = None
    mapped: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Model:
    """A trained model, ready to trace.

    `module` is in eval mode, in float32 and needs no gradients; its MoE layers are `MoELayer`
    modules. `original` is the untouched reference where that is not `module`: the user's own module
    where the model came from a factory, and the model before its `edits`. `order` names the MoE
    layers as they are executed, where that is not the order in which the module holds them.
    `config` holds the family's constructor arguments, JSON-able and complete. `notes` are sentences
    about defaults that were taken and keys that were skipped.
    """

    module: nn.Module
    family: str
    config: dict[str, Any]
    source: Source
    input: TensorSpec
    output: TensorSpec
    notes: tuple[str, ...] = ()
    original: nn.Module | None = None
    example: np.ndarray | None = field(default=None, compare=False)
    order: tuple[str, ...] = ()
    edits: Edits = NO_EDITS

    @property
    def layers(self) -> dict[str, MoELayer]:
        """The MoE layers by module path, in execution order."""
        layers = moe_layers(self.module)
        return {name: layers[name] for name in self.order or layers}
