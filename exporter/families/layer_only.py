"""Families whose layer is known, but not the network around it.

The graph consists of this one layer. `layer_family` makes the family from the layout of a layer;
`choose_layer` finds the layer to export in a file with other layers or weights. The two
backbones here wrap a single layer, including one from a user's own network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...errors import FamilyError
from ...graphs.layers.base import MoELayer
from ..model import TensorSpec
from .base import (
    AnyLayer,
    Config,
    Constructor,
    Family,
    FamilyModel,
    PublishedLayer,
    Tensors,
    find_layers,
    under,
)

LAYER = "layer"
"""The option that selects one layer in a file by its prefix."""

Choose = Callable[[PublishedLayer[Any], Tensors, str | None], tuple[str, tuple[str, ...]]]
"""Finds the layer to export in a file, given the value of `LAYER`: see `choose_layer`."""


class TokenBackbone(nn.Module):
    """One layer on tokens: (b, m, d) to (b, m, o)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class PixelBackbone(TokenBackbone):
    """One layer whose tokens are the pixels of (b, d, H, W), row by row; returns (b, o, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return y.reshape(y.shape[0], y.shape[1], x.shape[2], x.shape[3])


def choose_layer(
    layer: PublishedLayer[Any], tensors: Tensors, wanted: str | None
) -> tuple[str, tuple[str, ...]]:
    """Returns the prefix of the layer to export, and a note on the keys outside this layer.

    `wanted` is the value of `--set layer=`. Raises FamilyError if there is no such layer, or if
    there are several.
    """
    prefixes = find_layers(tensors, layer)
    if not prefixes:
        return "", ()  # the check of keys reports the missing ones
    if wanted is None:
        return _only_prefix(layer, tensors, prefixes), ()
    prefix = str(wanted).replace("/", ".").strip(".") + "."
    if prefix not in prefixes:
        raise FamilyError(
            f"{layer.family}: no layer at {wanted}",
            hint=f"layers in this file: {', '.join(map(_label, prefixes))}",
        )
    outside = sum(not key.startswith(prefix) for key in tensors)
    note = f"left out {outside} keys outside the layer {wanted}"
    return prefix, (note,) if outside else ()


def _only_prefix(layer: PublishedLayer[Any], tensors: Tensors, prefixes: list[str]) -> str:
    outside = [key for key in tensors if not any(key.startswith(p) for p in prefixes)]
    if len(prefixes) == 1 and not outside:
        return prefixes[0]
    names, plural = [_label(prefix) for prefix in prefixes], "" if len(prefixes) == 1 else "s"
    others = f" and other weights ({', '.join(outside[:3])}, …)" if outside else ""
    raise FamilyError(
        f"{layer.family}: the file contains {len(prefixes)} {layer.title} layer{plural} "
        f"({', '.join(names[:6])}){others}; only one layer of such a network can be exported",
        hint="give the network as package.module:factory with --weights, or choose one layer: "
        f"--set {LAYER}={names[0]}",
    )


def _label(prefix: str) -> str:
    return prefix.removesuffix(".") or "(the whole file)"


def token_io(layer: MoELayer, config: Config) -> tuple[TensorSpec, TensorSpec]:
    """Returns the input and output of a layer: tokens (b, m, d); `group_size` fixes m."""
    tokens = config.get("group_size") or "tokens"
    return (
        TensorSpec("input", "float32", ("batch", tokens, layer.spec.dim)),
        TensorSpec("output", "float32", ("batch", tokens, layer.spec.out)),
    )


def pixel_io(layer: MoELayer, _: Config) -> tuple[TensorSpec, TensorSpec]:
    return (
        TensorSpec("input", "float32", ("batch", layer.spec.dim, "height", "width")),
        TensorSpec("output", "float32", ("batch", layer.spec.out, "height", "width")),
    )


def layer_family(
    layer: PublishedLayer[AnyLayer],
    summary: str,
    constructor: Constructor,
    read: Callable[[AnyLayer, Tensors, Config], dict[str, Any]],
    *,
    apply: Callable[[AnyLayer, dict[str, Any]], tuple[str, ...]] = lambda *_: (),
    io: Callable[[AnyLayer, Config], tuple[TensorSpec, TensorSpec]] = token_io,
    backbone: Callable[[nn.Module], nn.Module] = TokenBackbone,
    choose: Choose = choose_layer,
) -> Family:
    """Returns a family that exports one layer within `backbone`, with the inputs and outputs `io`.

    `read` returns the settings that shapes determine, by their names in the constructor; its
    arguments are a layer, its tensors and the user's settings. `apply` applies the complete
    configuration to the layer, and returns notes or raises FamilyError if the model cannot be
    exported.
    """

    def build(tensors: Tensors, settings: Config) -> FamilyModel:
        prefix, notes = choose(layer, tensors, settings.get(LAYER))
        module = layer.make(prefix, tensors, "layer")
        arguments = {key: value for key, value in settings.items() if key != LAYER}
        config = constructor.settle(arguments, read(module, under(tensors, prefix), settings))
        if prefix:
            config[LAYER] = prefix.removesuffix(".")
        notes += apply(module, config)
        input_, output = io(module, config)
        return FamilyModel(
            module=backbone(module).eval(),
            config=config,
            inputs=(input_,),
            outputs=(output,),
            notes=notes,
        )

    return Family(
        name=constructor.family,
        summary=summary,
        options=(*constructor.options, LAYER),
        detect=lambda tensors: bool(find_layers(tensors, layer)),
        build=build,
        layer=layer,
        questions=tuple(constructor.questions),
    )
