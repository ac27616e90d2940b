"""Families of which moexport knows the layer and not the network around it.

Such a layer is exported by itself, as the whole graph. `layer_family` makes the family from a Soft
MoE layer's layout; `choose_layer` finds the one to export in a file that holds more. The two
backbones here are what stands around a single layer, also in a user's own network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...errors import FamilyError
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec
from ..model import Dimension, TensorSpec
from .base import (
    REST,
    Built,
    Call,
    Config,
    Family,
    LayerLayout,
    PublishedLayer,
    Question,
    Tensors,
    activation_of,
    find_layers,
    settle,
    under,
)

LAYER = "layer"
"""Option that picks one layer of a file that holds more, by its prefix."""


class TokenBackbone(nn.Module):
    """One layer on tokens: (b, m, d) to (b, m, o)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        y: Tensor = self.layer(x)
        return y


class PixelBackbone(nn.Module):
    """One layer whose tokens are the pixels of (b, d, H, W), row by row; returns (b, o, H, W)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output in the layout of its input."""
        y: Tensor = self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return y.reshape(y.shape[0], y.shape[1], x.shape[2], x.shape[3])


def layer_family(
    layer: PublishedLayer,
    summary: str,
    read_config: Callable[[SoftMoESpec, Tensors, Config], dict[str, Any]],
    *,
    options: tuple[str, ...],
    required: Mapping[str, Question] | None = None,
    free: Config | None = None,
    call: Call | None = None,
    check: Callable[[Config, SoftMoESpec], tuple[str, ...]] | None = None,
    pixels: bool = False,
) -> Family:
    """Returns a family that exports one layer: tokens (b, m, d), or with `pixels` (b, d, H, W).

    `read_config` says what shapes tell, by the names of the layer's constructor; `required`,
    `free` and `call` are those of `settle`. `check` looks at the settled configuration and returns
    notes; it raises FamilyError for a model that cannot be exported.
    """

    def build(tensors: Tensors, given: Config) -> Built:
        prefix, notes = choose_layer(layer, tensors, given.get(LAYER))
        spec, weights = layer.load("layer", prefix, tensors)
        read = read_config(spec, under(tensors, prefix), given)
        told = {key: value for key, value in given.items() if key != LAYER}
        config = settle(layer.family, told, read, required=required, free=free, call=call)
        if prefix:
            config[LAYER] = prefix.removesuffix(".")
        if check is not None:
            notes += check(config, spec)
        if "act_layer" in config:
            spec = replace(spec, activation=activation_of(layer.family, config["act_layer"]))
        tokens: Dimension = config.get("group_size") or "tokens"

        def shape(width: int) -> tuple[Dimension, ...]:
            return ("batch", width, "height", "width") if pixels else ("batch", tokens, width)

        backbone = (PixelBackbone if pixels else TokenBackbone)(SoftMoE(spec, weights))
        return Built(
            backbone.eval(),
            config,
            TensorSpec("input", "float32", shape(spec.dim)),
            TensorSpec("output", "float32", shape(spec.out)),
            notes,
        )

    return Family(
        name=layer.family,
        summary=summary,
        options=(*options, *(required or ()), *(free or ()), *((REST,) if call else ()), LAYER),
        detect=lambda tensors: bool(find_layers(tensors, layer)),
        build=build,
        layer=layer,
        asked=tuple(required or ()),
    )


def choose_layer(
    layer: LayerLayout, tensors: Tensors, wanted: str | None
) -> tuple[str, tuple[str, ...]]:
    """Returns the prefix of the layer to export, and a note on the keys that lie outside of it.

    `wanted` is what `--set layer=` says. Raises FamilyError where there is no such layer, or
    several to choose from.
    """
    found = find_layers(tensors, layer)
    if not found:
        return "", ()  # the check of the keys says what is missing
    if wanted is None:
        return _the_only(layer, tensors, found), ()
    prefix = str(wanted).replace("/", ".").strip(".") + "."
    if prefix not in found:
        raise FamilyError(
            f"{layer.family}: no layer at {wanted}",
            hint=f"layers in this file: {', '.join(map(_place, found))}",
        )
    outside = sum(not key.startswith(prefix) for key in tensors)
    note = f"left out {outside} keys that are not of the layer {wanted}"
    return prefix, (note,) if outside else ()


def _the_only(layer: LayerLayout, tensors: Tensors, found: list[str]) -> str:
    outside = [key for key in tensors if not any(key.startswith(p) for p in found)]
    if len(found) == 1 and not outside:
        return found[0]
    names = [_place(prefix) for prefix in found]
    beside = f" beside other weights ({', '.join(outside[:3])}, …)" if outside else ""
    raise FamilyError(
        f"{layer.family}: the file holds {len(found)} {layer.title} layers "
        f"({', '.join(names[:6])}){beside}; of such a network only one layer can be exported",
        hint="give the network as package.module:factory with --weights, or pick one layer: "
        f"--set {LAYER}={names[0]}",
    )


def _place(prefix: str) -> str:
    return prefix.removesuffix(".") or "(the whole file)"
