"""`soft-moe-vmoe`: the layer of google-research/vmoe, from a flat dict of JAX arrays.

It is recognised by `Router.mu` [d, n, p] and `Mlp.Dense_0.kernel` [n, d, h]. x is normalised only
inside the router: the slots average the raw x. The published module divides all tokens into groups
of `group_size`, which are routed separately; each row of the exported layer's input is one group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import FamilyError
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from .base import (
    Config,
    Constructor,
    Tensors,
    TensorShape,
    find_layers,
    shape_of,
    soft_moe_layer,
    unit_phi,
    whole_number,
)
from .layer_only import layer_family

NAME = "soft-moe-vmoe"
EPS = 1e-6
MU, SCALE = "Router.mu", "Router.scale"
FIRST, SECOND = "Mlp.Dense_0", "Mlp.Dense_1"


def _match(tensors: Tensors) -> bool:
    return tensors[MU].ndim == 3 and f"{FIRST}.kernel" in tensors


def _shapes(tensors: Tensors) -> dict[str, TensorShape]:
    d, n, p = shape_of(NAME, tensors, MU, "d, n, p")
    kernel, scale = tensors.get(f"{FIRST}.kernel"), tensors.get(SCALE)
    h = kernel.shape[-1] if kernel is not None else 0
    return {
        MU: (d, n, p),
        # The parameter is a scalar; some converters add an axis.
        SCALE: (1,) if scale is not None and scale.ndim else (),
        f"{FIRST}.kernel": (n, d, h),
        f"{FIRST}.bias": (n, h),
        f"{SECOND}.kernel": (n, h, d),
        f"{SECOND}.bias": (n, d),
    }


def _read(name: str, tensors: Tensors) -> SoftMoE:
    d, n, p = tensors[MU].shape
    w1, w2 = tensors[f"{FIRST}.kernel"], tensors[f"{SECOND}.kernel"]
    spec = SoftMoESpec(
        name,
        experts=n,
        slots=p,
        dim=d,
        hidden=w1.shape[2],
        out=d,
        activation="gelu-tanh",  # the default of jax.nn.gelu
        norm="l2-rsqrt",
        norm_eps=EPS,
        slots_from="raw",
    )
    phi = unit_phi(tensors[MU], tensors[SCALE], eps=EPS, kind="l2-rsqrt")
    b1, b2 = tensors[f"{FIRST}.bias"], tensors[f"{SECOND}.bias"]
    return SoftMoE(spec, SoftMoEWeights(phi=phi, w1=w1, b1=b1, w2=w2, b2=b2))


def _config(layer: SoftMoE, _: Tensors, __: Config) -> dict[str, Any]:
    spec = layer.spec
    return {"num_experts": spec.experts, "num_slots": spec.slots, "mlp_dim": spec.hidden}


def _check(_: SoftMoE, config: Config) -> tuple[str, ...]:
    if config["noise_std"] and config["deterministic"] is False:
        raise FamilyError(
            f"{NAME}: deterministic=False also adds noise to the router at inference",
            hint="leave it out to export the layer without noise",
        )
    if config["group_size"] is not None:
        whole_number(NAME, "group_size", config["group_size"])
    return (
        "tokens are routed within each row of the input: if group_size was not the number of "
        "tokens in an image, the input is (groups, group_size, dim)",
        "experts use the tanh form of GELU, as jax.nn.gelu does by default; dispatch and combine "
        "stay in float32, while the published code rounds them to bfloat16",
    )


def _is_alone(tensors: Tensors) -> bool:
    """Whether the layer is not part of the known network (`vmoe_vit`)."""
    return bool(find_layers(tensors, FAMILY.layer)) and "embedding.kernel" not in tensors


FAMILY = layer_family(
    soft_moe_layer(NAME, MU, _match, _shapes, _read),
    "one layer on (batch, tokens, dim) from a flat dict of JAX arrays (google-research/vmoe)",
    Constructor(
        family=NAME,
        shapes=dict.fromkeys(("num_experts", "num_slots", "mlp_dim"), ...),
        free={"group_size": None, "capacity_factor": None, "noise_std": 0.0, "deterministic": None},
    ),
    _config,
    apply=_check,
)
FAMILY = replace(FAMILY, detect=_is_alone)
