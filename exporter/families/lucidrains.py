"""`soft-moe-pytorch`: the layer of lucidrains/soft-moe-pytorch.

It is recognised by `slot_embeds` [n, p, d] and `norm.gamma`. The slots are embeddings, normalised
like the tokens (by RMSNorm, or by LayerNorm if there is a `beta`) but with their own gain. Experts
are GEGLU if their first layer is twice as wide as the input of the second.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ...errors import FamilyError
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from .base import (
    Config,
    Constructor,
    SeparateExperts,
    Tensors,
    TensorShape,
    shape_of,
    soft_moe_layer,
)
from .layer_only import layer_family

NAME = "soft-moe-pytorch"
L2_EPS = 1e-12
LAYER_NORM_EPS = 1e-5
FIRST, SECOND = "experts.experts.{}.0", "experts.experts.{}.3"


def _match(tensors: Tensors) -> bool:
    return tensors["slot_embeds"].ndim == 3 and "norm.gamma" in tensors


def _experts(tensors: Tensors) -> SeparateExperts:
    plain = SeparateExperts(FIRST, SECOND)
    first, second = (plain.any_of(tensors, name, "weight") for name in (FIRST, SECOND))
    gated = first is not None and second is not None and first.shape[0] == 2 * second.shape[-1]
    return SeparateExperts(FIRST, SECOND, gated=gated)


def _shapes(tensors: Tensors) -> dict[str, TensorShape]:
    n, p, d = shape_of(NAME, tensors, "slot_embeds", "n, p, d")
    expected: dict[str, TensorShape] = {"slot_embeds": (n, p, d)}
    layer_norm = "norm.beta" in tensors or "slot_norm.beta" in tensors
    for norm in ("norm", "slot_norm"):
        expected[f"{norm}.gamma"] = (d,)
        if layer_norm:
            expected[f"{norm}.beta"] = (d,)
    return expected | _experts(tensors).shapes(tensors, n, d)


def _slots(tensors: Tensors) -> Tensor:
    """Returns phi [d, n, p]: the slot embeddings, normalised like tokens, with their own gain."""
    embeds, gamma = tensors["slot_embeds"].double(), tensors["slot_norm.gamma"].double()
    if "slot_norm.beta" in tensors:
        beta = tensors["slot_norm.beta"].double()
        normed = F.layer_norm(embeds, embeds.shape[-1:], gamma, beta, LAYER_NORM_EPS)
    else:
        normed = F.normalize(embeds, dim=-1, eps=L2_EPS) * (math.sqrt(len(gamma)) * gamma)
    return normed.permute(2, 0, 1).float().contiguous()


def _read(name: str, tensors: Tensors) -> SoftMoE:
    n, p, d = tensors["slot_embeds"].shape
    experts = _experts(tensors)
    gamma, beta = tensors["norm.gamma"], tensors.get("norm.beta")
    layer_norm = beta is not None
    # RMSNorm is x/‖x‖ with the gain √d·γ.
    gain = gamma if layer_norm else (gamma.double() * math.sqrt(d)).float()
    spec = SoftMoESpec(
        name,
        experts=n,
        slots=p,
        dim=d,
        hidden=experts.hidden(tensors),
        out=d,
        expert="gated" if experts.gated else "mlp",
        norm="layernorm" if layer_norm else "l2",
        norm_eps=LAYER_NORM_EPS if layer_norm else L2_EPS,
    )
    matrices = experts.matrices(tensors, n)
    return SoftMoE(spec, SoftMoEWeights(_slots(tensors), *matrices, gain, beta))


def _config(layer: SoftMoE, _: Tensors, settings: Config) -> dict[str, Any]:
    spec = layer.spec
    geglu = spec.expert == "gated"
    mult = spec.hidden / spec.dim * (1.5 if geglu else 1.0)
    given = settings.get("expert_mult")
    if (
        isinstance(given, int | float)
        and math.isfinite(given)
        and (int(spec.dim * given * 2 / 3) if geglu else int(spec.dim * given)) == spec.hidden
    ):
        mult = given  # widths are truncated, so several values are equivalent
    return {
        "dim": spec.dim,
        "num_experts": spec.experts,
        "num_slots": spec.slots,
        "expert_mult": mult,
        "geglu": geglu,
        "use_layernorm": spec.norm == "layernorm",
    }


def _check(layer: SoftMoE, config: Config) -> tuple[str, ...]:
    """Checks `seq_len`, another way to give the number of slots."""
    spec, seq_len = layer.spec, config["seq_len"]
    if isinstance(seq_len, int) and seq_len // spec.experts != spec.slots:
        raise FamilyError(
            f"{NAME}: seq_len={seq_len} gives {seq_len // spec.experts} slots for each of "
            f"{spec.experts} experts, but the shapes imply num_slots={spec.slots}"
        )
    return ()


FAMILY = layer_family(
    soft_moe_layer(NAME, "slot_embeds", _match, _shapes, _read),
    "one layer with slot embeddings, on (batch, tokens, dim) (lucidrains/soft-moe-pytorch)",
    Constructor(
        family=NAME,
        shapes=dict.fromkeys(
            ("dim", "num_experts", "num_slots", "expert_mult", "geglu", "use_layernorm"), ...
        ),
        free={
            "seq_len": None,
            "dropout": 0.0,
            "is_distributed": None,
            "offload_unused_experts_to_cpu": True,
        },
    ),
    _config,
    apply=_check,
)
