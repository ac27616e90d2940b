"""A model with edits: checked against its layers, and a copy of it that computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import UsageError
from ..graphs.layers.base import MoESpec, moe_layers, sharing_weights
from ..graphs.layers.edits import LayerEdits, Rewrite
from .edits import Ablation, Edits, LayerRewrite
from .model import Model


def edited(model: Model, edits: Edits) -> Model:
    """Returns the model with edits in its layers; the model itself where there are none.

    The untouched module is its `original`, and all weights are shared. Raises UsageError for a
    layer, level, expert or output that is not there.
    """
    if not edits:
        return model
    by_layer = _by_layer(edits, {name: layer.spec for name, layer in model.layers.items()})
    module = sharing_weights(model.module)
    layers = moe_layers(module)
    for name, each in by_layer.items():
        layers[name].edits = each
    untouched = model.original if model.original is not None else model.module
    return replace(model, module=module, original=untouched, edits=edits)


def _by_layer(edits: Edits, specs: Mapping[str, MoESpec]) -> dict[str, LayerEdits]:
    ablated: dict[str, set[tuple[int, int]]] = {}
    for ablation in edits.ablations:
        spec = _spec(ablation.layer, specs, f"--ablate {ablation.text}")
        ablated.setdefault(ablation.layer, set()).add(_place(ablation, spec))
    rewrites: dict[str, list[Rewrite]] = {}
    for each in edits.rewrites:
        _check_rewrite(each, _spec(each.layer, specs, "--rewrite"))
        rewrites.setdefault(each.layer, []).append(each.rewrite)
    return {
        name: LayerEdits(frozenset(ablated.get(name, ())), tuple(rewrites.get(name, ())))
        for name in (*ablated, *rewrites)
    }


def _spec(layer: str, specs: Mapping[str, MoESpec], option: str) -> MoESpec:
    if layer not in specs:
        raise UsageError(
            f"{option}: the model has no MoE layer {layer}",
            hint=f"its MoE layers: {', '.join(specs)}",
        )
    return specs[layer]


def _place(ablation: Ablation, spec: MoESpec) -> tuple[int, int]:
    """The level, from 0, and the expert of it."""
    count = len(spec.levels)
    sizes = ", ".join(f"{level} has {n}" for level, n in enumerate(spec.levels, start=1))
    if ablation.level is None and count > 1:
        raise UsageError(
            f"--ablate {ablation.text}: layer {spec.name} has {count} levels of experts",
            hint=f"say which: {spec.name}:1.{ablation.expert} is expert {ablation.expert} of level "
            f"1 (experts by level: {sizes})",
        )
    level = 1 if ablation.level is None else ablation.level
    if not 1 <= level <= count:
        raise UsageError(
            f"--ablate {ablation.text}: layer {spec.name} has no level {level}",
            hint=f"levels are counted from 1 (experts by level: {sizes})",
        )
    n = spec.levels[level - 1]
    if not 0 <= ablation.expert < n:
        of_level = f" in level {level}" if count > 1 else ""
        raise UsageError(
            f"--ablate {ablation.text}: layer {spec.name} has {n} experts{of_level}",
            hint=f"they are counted from 0: use 0 to {n - 1}",
        )
    return level - 1, ablation.expert


def _check_rewrite(each: LayerRewrite, spec: MoESpec) -> None:
    what = f"--rewrite: output {each.rewrite.output} of layer {spec.name}"
    if spec.kind != "mumoe":
        raise UsageError(
            f"{what}: a {spec.kind} layer has no coefficients to re-write an output by",
            hint="only muMoE layers can be re-written; --ablate works for both kinds",
        )
    if each.rewrite.output >= spec.out:
        raise UsageError(
            f"{what}: the layer has {spec.out} outputs",
            hint=f"they are counted from 0: use 0 to {spec.out - 1}",
        )
    given = [len(vector) for vector in each.rewrite.coefficients]
    if given != list(spec.levels):
        raise UsageError(
            f"{what}: {_lengths(given)} coefficients, and the layer has {_lengths(spec.levels)} "
            "experts",
            hint="give one list per level, with the mean coefficient of every expert; "
            "`moexport specialise` writes them",
        )


def _lengths(sizes: list[int] | tuple[int, ...]) -> str:
    return " and ".join(map(str, sizes))
