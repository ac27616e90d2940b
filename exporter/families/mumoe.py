"""`mumoe` and `mumoe-clip`: one layer, block or head of james-oldfield/muMoE.

They are recognised by `projs.{e}` [d, n_e], one for each level of experts, and `MuMoE.factors.{j}`:
matrices of the same rank (CP) or cores that chain (TR). `MuMoE.core` marks a Tucker form, and
`MuMoE.weight` is the unfactorised tensor; the released code has neither. A block's second tensor is
`MuMoE2`. The code that its networks (`mumoe_mixer` and `mumoe_gpt2`) share follows the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from torch import Tensor

from ...errors import CheckpointError, FamilyError
from ...graphs.layers.mumoe import (
    FactorisedSpec,
    Form,
    GateActivation,
    MuMoE,
    MuMoESpec,
    MuMoEWeights,
)
from ..model import TensorSpec
from .base import (
    AnyNetwork,
    Config,
    Constructor,
    Family,
    FamilyModel,
    PublishedLayer,
    Question,
    Tensors,
    TensorShape,
    check_tensors,
    filled,
    find_layers,
    prefixed,
    shapes_of,
    under,
)
from .layer_only import Choose, choose_layer, layer_family

NAME = "mumoe"
HEAD_NAME = "mumoe-clip"
HEAD, BACKBONE = "1.", "0."
"""The prefixes of the muMoE head and of the backbone in a fine-tuned CLIP network."""

FIRST, SECOND = "MuMoE", "MuMoE2"
FULL, CORE, FACTORS = "weight", "core", "factors"
"""The names of a full tensor, of a Tucker form's core, and of factors or TR cores."""

COUNTER = "num_batches_tracked"
ACTIVATION = "act"
RANK = "input_rank"

CLASS_NAMES: dict[Form, str] = {
    "cp": "CPMuMoE",
    "tr": "TRMuMoE",
    "tucker": "TuckerMuMoE",
    "full": "FullMuMoE",
}
"""The released code has only the first two classes."""


# --- the configuration -------------------------------------------------------------------------


ACTIVATIONS = ", ".join(get_args(GateActivation))
ACTIVATION_QUESTION = Question("entmax15", f"the gate's activation: {ACTIVATIONS}")


def _without_modes(settings: Config, _: Config) -> Config:
    """Replaces the middle of each triple of ranks with None, because the code ignores it."""
    ranks = settings.get("ranks")
    if isinstance(ranks, list) and all(isinstance(r, list) and len(r) == 3 for r in ranks):
        return {**settings, "ranks": [[r[0], None, r[2]] for r in ranks]}
    return settings


SIZES = ("MuMoE_layer", "input_dim", "output_dim", "expert_dims", "ranks")

CONSTRUCTOR = Constructor(
    family=NAME,
    shapes={
        **dict.fromkeys(SIZES, ...),
        "second_dim": 0,
        "normalization": "bn",
        "use_bias": True,
        "hierarchy": 1,
        "apply_ln": False,
    },
    questions={ACTIVATION: ACTIVATION_QUESTION},
    free={RANK: 3},
    sizes=SIZES,
    write=_without_modes,
)


def activate(family: str, layers: Iterable[MuMoE], config: dict[str, Any]) -> None:
    """Sets the gate activation of layers from `config`; FamilyError for an unknown one."""
    value = "entmax15" if config[ACTIVATION] == "entmax" else config[ACTIVATION]
    activation = next((name for name in get_args(GateActivation) if name == value), None)
    if activation is None:
        raise FamilyError(
            f"{family}: {ACTIVATION}={value} is not a gate activation",
            hint=f"choose one of: {ACTIVATIONS}",
        )
    config[ACTIVATION] = activation
    for layer in layers:
        layer.spec = replace(layer.spec, activation=activation)


def layer_arguments(layer: MuMoE) -> dict[str, Any]:
    """Returns the published constructor's arguments for a layer, from its shapes."""
    spec, first = layer.spec, layer.spec.tensors[0]
    return {
        "MuMoE_layer": CLASS_NAMES[first.form],
        "input_dim": spec.dim,
        "output_dim": first.out,
        "expert_dims": list(spec.levels),
        "ranks": _ranks(first),
        "second_dim": spec.out if len(spec.tensors) > 1 else 0,
        "normalization": spec.norm,
        "use_bias": first.bias,
        "hierarchy": len(spec.levels),
        "apply_ln": spec.input_norm,
    }


def _ranks(tensor: FactorisedSpec) -> Any:
    """Returns the ranks as in the published code: a number, a triple per core, or one per mode."""
    match tensor.form:
        case "cp":
            return tensor.ranks[0]
        case "tr":
            following = (*tensor.ranks[1:], tensor.ranks[0])
            return [[r, None, s] for r, s in zip(tensor.ranks, following, strict=True)]
        case "tucker":
            return list(tensor.ranks)
        case "full":
            return None


# --- one tensor ---------------------------------------------------------------------------------


def numbered(tensors: Tensors, name: str) -> list[Tensor]:
    """Returns the tensors `name.0`, `name.1`, … up to the first gap."""
    parts: list[Tensor] = []
    while (tensor := tensors.get(f"{name}.{len(parts)}")) is not None:
        parts.append(tensor)
    return parts


def tensor_names(spec: FactorisedSpec) -> tuple[str, ...]:
    """Returns the local names of a tensor's factors or cores, in the order of `spec.shapes`."""
    if spec.form == "full":
        return (FULL,)
    factors = tuple(f"{FACTORS}.{number}" for number in range(len(spec.modes)))
    return (CORE, *factors) if spec.form == "tucker" else factors


def read_tensor(
    where: str, key: str, tensors: Tensors, levels: tuple[int, ...], dim: int
) -> FactorisedSpec:
    """Returns the spec of the tensors under `key`, for a layer with these levels and input width.

    Raises CheckpointError if the tensors do not fit each other, the levels or the input.
    """
    read = _full_sizes if FULL in tensors else _factor_sizes
    form, modes, ranks = read(where, key, tensors, levels)
    what = f"{key}.{FULL} is" if form == "full" else f"{key}.{FACTORS} are"
    if modes[:-2] != levels:
        raise CheckpointError(
            f"{where}: {what} for {list(modes[:-2])} experts by level, but projs.* are for "
            f"{list(levels)}"
        )
    if modes[-2] not in (dim, dim + 1):
        source = FULL if form == "full" else f"{FACTORS}.{len(levels)}"
        raise CheckpointError(
            f"{where}: {key}.{source} accepts inputs of width {modes[-2]}, expected {dim}, or "
            f"{dim + 1} with a bias row"
        )
    return FactorisedSpec(
        form=form, levels=levels, dim=dim, out=modes[-1], ranks=ranks, bias=modes[-2] == dim + 1
    )


TensorSizes = tuple[Form, tuple[int, ...], tuple[int, ...]]
"""The form of a tensor, the sizes of its modes, and its ranks."""


def _full_sizes(where: str, key: str, tensors: Tensors, levels: tuple[int, ...]) -> TensorSizes:
    shape = tuple(tensors[FULL].shape)
    if len(shape) != len(levels) + 2:
        raise CheckpointError(
            f"{where}: {key}.{FULL} has the shape {list(shape)}, but {len(levels)} levels of "
            f"experts (projs.*) need {len(levels) + 2} axes: [n, …, d, o]"
        )
    if 0 in shape:
        raise CheckpointError(f"{where}: {key}.{FULL} has a size of zero: {list(shape)}")
    return "full", shape, ()


def _factor_sizes(where: str, key: str, tensors: Tensors, levels: tuple[int, ...]) -> TensorSizes:
    shapes, core = [tuple(t.shape) for t in numbered(tensors, FACTORS)], tensors.get(CORE)
    factors, axes = f"{where}: {key}.{FACTORS}", {len(shape) for shape in shapes}
    listed = ", ".join(str(list(shape)) for shape in shapes)
    if len(shapes) != len(levels) + 2:
        raise CheckpointError(
            f"{where}: {key} has {len(shapes)} factors, but {len(levels)} levels of experts "
            f"(projs.*) need {len(levels) + 2}",
            hint="one factor per level, one for the input and one for the output: is the "
            "checkpoint complete?",
        )
    if core is not None and axes != {2}:
        raise CheckpointError(f"{factors} with a {CORE} are not matrices [n, R]: {listed}")
    if axes not in ({2}, {3}):
        raise CheckpointError(f"{factors} are neither CP [n, R] nor TR [r, n, r']: {listed}")
    first, second = (tuple(shape[axis] for shape in shapes) for axis in (0, 1))
    if core is not None and tuple(core.shape) != second:
        raise CheckpointError(
            f"{where}: {key}.{CORE} has the shape {list(core.shape)}, but the ranks of "
            f"{key}.{FACTORS} are {list(second)}",
            hint="a Tucker form's core has one axis per factor, whose size is the factor's rank",
        )
    if any(0 in shape for shape in shapes):
        raise CheckpointError(f"{factors} have a size or a rank of zero: {listed}")
    if core is not None:
        return "tucker", first, second
    if axes == {2}:
        if len(set(second)) > 1:
            raise CheckpointError(f"{factors} do not share one rank R: {listed}")
        return "cp", first, second[:1]
    if tuple(shape[2] for shape in shapes) != (*first[1:], first[0]):
        raise CheckpointError(
            f"{factors} do not chain: each must end with the rank of the next: {listed}",
            hint="the cores of a TR layer form a ring: the last ends with the rank of the first",
        )
    return "tr", second, first


# --- one layer ----------------------------------------------------------------------------------


def read_layer(prefix: str, tensors: Tensors, name: str) -> MuMoE:
    """Returns the layer under `prefix`, named `name`, with entmax15 for its gate.

    Raises CheckpointError for factors that do not chain, a wrong number of levels, ranks of zero,
    two tensors of different forms, and missing or misshapen tensors.
    """
    local = {k: t for k, t in under(tensors, prefix).items() if not k.endswith(COUNTER)}
    where = prefix.removesuffix(".") or "the layer"
    levels = numbered(local, "projs")
    if not levels or any(t.ndim != 2 for t in levels):
        raise CheckpointError(f"{where}: not a muMoE layer: it needs projs.0 [d, n]")
    sizes = tuple(int(t.shape[1]) for t in levels)
    specs, factors, width = [], [], int(levels[0].shape[0])
    for key in (FIRST, SECOND):
        parts = under(local, f"{key}.")
        if not parts:
            continue
        specs.append(read_tensor(where, key, parts, sizes, width))
        factors.append(tuple(parts[part] for part in tensor_names(specs[-1])))
        width = specs[-1].out
    if not specs:
        raise CheckpointError(f"{where}: not a muMoE layer: {FIRST}.factors.0 is missing")
    if len({spec.form for spec in specs}) > 1:
        names = ", ".join(CLASS_NAMES[spec.form] for spec in specs)
        raise CheckpointError(
            f"{where}: {FIRST} and {SECOND} have different forms ({names})",
            hint="both tensors of a block are made by the same class",
        )
    batch_norm = any(key.startswith("bn.") for key in local)
    spec = MuMoESpec(
        name=name,
        tensors=tuple(specs),
        norm="bn" if batch_norm else "ln",
        input_norm=any(key.startswith("input_ln.") for key in local),
    )
    check_tensors(NAME, prefixed(local, prefix), prefixed(_shapes(spec), prefix))
    normed = range(len(sizes) if batch_norm else 0)
    for level in normed:
        variance = local[f"bn.{level}.running_var"]
        smallest = 0.0 if variance.is_meta else float(variance.min())
        if smallest < 0:  # its square root would be NaN
            raise CheckpointError(
                f"{prefix}bn.{level}.running_var contains the negative variance {smallest:.3g}",
                hint="the file is damaged: use another copy or an earlier checkpoint",
            )
    return MuMoE(
        spec,
        MuMoEWeights(
            projections=tuple(levels),
            tensors=tuple(factors),
            means=tuple(local[f"bn.{i}.running_mean"] for i in normed),
            variances=tuple(local[f"bn.{i}.running_var"] for i in normed),
            gain=local.get("input_ln.weight"),
            shift=local.get("input_ln.bias"),
        ),
    ).eval()


def _shapes(spec: MuMoESpec) -> dict[str, TensorShape]:
    expected: dict[str, TensorShape] = {}
    for index, tensor in enumerate(spec.tensors):
        key = (FIRST, SECOND)[index]
        for name, shape in zip(tensor_names(tensor), tensor.shapes, strict=True):
            expected[f"{key}.{name}"] = shape
    for level, n in enumerate(spec.levels):
        expected[f"projs.{level}"] = (spec.dim, n)
        if spec.norm == "bn":
            expected[f"bn.{level}.running_mean"] = (n,)
            expected[f"bn.{level}.running_var"] = (n,)
    if spec.input_norm:
        expected["input_ln.weight"] = (spec.dim,)
        expected["input_ln.bias"] = (spec.dim,)
    return expected


def _match(tensors: Tensors) -> bool:
    return any(f"{FIRST}.{key}" in tensors for key in (FULL, CORE, f"{FACTORS}.0"))


LAYOUT = PublishedLayer(family=NAME, mark="projs.0", match=_match, make=read_layer, title="muMoE")
"""The layout of a layer in all networks of the published code."""

# --- networks of such layers ----------------------------------------------------------------------

BACKBONES: Mapping[str, str] = {"mumoe-mixer": "mixer_blocks.0.", "mumoe-gpt2": "transformer.h.0."}
"""Families of whole networks, and a prefix that identifies each."""


def is_backbone(tensors: Tensors, family: str) -> bool:
    """Whether tensors are a network of this family that contains muMoE layers."""
    has_prefix = any(key.startswith(BACKBONES[family]) for key in tensors)
    return has_prefix and bool(find_layers(tensors, LAYOUT))


def backbone_family(
    constructor: Constructor,
    summary: str,
    build: Callable[[Tensors, Config], FamilyModel],
    questions: tuple[str, ...],
) -> Family:
    """Returns the family of a network whose MLPs are muMoE layers (see `BACKBONES`).

    `questions` are the arguments that shapes do not always determine.
    """
    return Family(
        name=constructor.family,
        summary=summary,
        options=constructor.options,
        detect=lambda tensors: is_backbone(tensors, constructor.family),
        build=build,
        layer=LAYOUT,
        questions=questions,
    )


def with_layers(
    name: str,
    backbone: AnyNetwork,
    tensors: Tensors,
    layers: Mapping[str, MuMoE],
    widths: Mapping[str, int],
) -> AnyNetwork:
    """Loads weights into a backbone from the meta device, and sets layers at their paths.

    `widths` has the width of each layer's input and output, by path. Raises CheckpointError if
    weights or a layer do not fit the backbone.
    """
    prefixes = tuple(f"{path}." for path in layers)
    others = {key: tensor for key, tensor in tensors.items() if not key.startswith(prefixes)}
    check_tensors(name, others, shapes_of(backbone))
    for path, layer in layers.items():
        if (layer.spec.dim, layer.spec.out) != (widths[path], widths[path]):
            raise CheckpointError(
                f"{path}: the layer maps {layer.spec.dim} to {layer.spec.out}, but the network is "
                f"{widths[path]} wide"
            )
    return filled(backbone, others, layers)


# --- layers and heads as models -------------------------------------------------------------------


def _apply(family: str, layer: MuMoE, config: dict[str, Any]) -> tuple[str, ...]:
    activate(family, [layer], config)
    if config[RANK] not in (2, 3):
        raise FamilyError(
            f"{family}: {RANK}={config[RANK]}, but a layer accepts (batch, tokens, dim) or "
            "(batch, dim)",
            hint=f"--set {RANK}=3, or 2 for vectors, whose output is (batch, 1, out)",
        )
    return ()


def _io(layer: MuMoE, config: Config) -> tuple[TensorSpec, TensorSpec]:
    spec = layer.spec
    if config[RANK] == 2:
        return (
            TensorSpec("input", "float32", ("batch", spec.dim)),
            TensorSpec("output", "float32", ("batch", 1, spec.out)),
        )
    return (
        TensorSpec("input", "float32", ("batch", "tokens", spec.dim), implied="tokens"),
        TensorSpec("output", "float32", ("batch", "tokens", spec.out)),
    )


def _family(
    constructor: Constructor, summary: str, choose: Choose, detect: Callable[[Tensors], bool]
) -> Family:
    family = layer_family(
        replace(LAYOUT, family=constructor.family),
        summary,
        constructor,
        lambda layer, *_: layer_arguments(layer),
        apply=partial(_apply, constructor.family),
        io=_io,
        choose=choose,
    )
    return replace(family, detect=detect, layer=LAYOUT)


def _choose_head(_: object, tensors: Tensors, __: object) -> tuple[str, tuple[str, ...]]:
    outside = sum(key.startswith(BACKBONE) for key in tensors)
    note = (
        f"exported only the head, without {outside} tensors of the backbone (0.*); give the "
        "whole network as package.module:factory with --weights"
    )
    return HEAD, (note,) if outside else ()


def _is_head(tensors: Tensors) -> bool:
    nothing_else = all(key.startswith((BACKBONE, HEAD)) for key in tensors)
    return nothing_else and find_layers(tensors, LAYOUT) == [HEAD]


def _is_layer(tensors: Tensors) -> bool:
    in_network = _is_head(tensors) or any(is_backbone(tensors, family) for family in BACKBONES)
    return bool(find_layers(tensors, LAYOUT)) and not in_network


FAMILY = _family(
    CONSTRUCTOR, "one muMoE layer, block or head (james-oldfield/muMoE)", choose_layer, _is_layer
)

HEAD_FAMILY = _family(
    replace(CONSTRUCTOR, family=HEAD_NAME, free={RANK: 2}),
    "the muMoE head of a fine-tuned CLIP backbone (james-oldfield/muMoE, finetune)",
    _choose_head,
    _is_head,
)
