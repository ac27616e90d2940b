"""Converts the experts of `transformers` to our layer; checks that both compute the same result.

Architectures whose experts class has the decorator `use_experts_implementation` store their weights
in a few layouts, which the flags of the decorator identify. The operation between the two products
is defined only in code, which is run on test values; a class without an equivalent is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ...errors import FamilyError
from ...graphs.layers.expert import Activation
from .layers.experts import Experts, ExpertsSpec, ExpertsWeights, Gate

FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")

QUICK_GELU = 1.702
"""The factor of the quick GELU, z·sigmoid(1.702·z)."""

ROWS = 7
"""The number of tokens in a check."""

TOLERANCE = 1e-5
"""A share of max|y|, since sums in a different order round differently."""


def experts_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of a network that use the library's experts interface, by path."""
    return {
        name: module
        for name, module in network.named_modules()
        if all(hasattr(module, flag) for flag in FLAGS)
    }


def canonical(name: str, module: Any, k: int) -> Experts:
    """Returns the layer of an experts module; its weights are views of the module's.

    Raises `FamilyError` if no layer computes what the module does.
    """
    first = module.gate_up_proj if module.has_gate else module.up_proj
    second = module.down_proj
    if not module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    bias = down_bias = None
    if module.has_bias:
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    n, d, _ = first.shape
    spec = ExpertsSpec(
        name=name, experts=n, k=k, dim=d, hidden=second.shape[1], out=second.shape[2]
    )
    scale = None
    if module.has_post_expert_norm:
        scale, epsilon = _post_norm(name, module.post_expert_norm, spec.out)
        spec = replace(spec, post_norm=True, post_norm_eps=epsilon)
    spec = _with_gate(spec, module)
    weights = ExpertsWeights(w1=first, w2=second, b1=bias, b2=down_bias, scale=scale)
    return Experts(spec, weights)


def check_layer(layer: Experts, module: nn.Module) -> None:
    """Raises `FamilyError` if a layer does not compute what the module does; reads the weights."""
    spec, generator = layer.spec, torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, spec.dim, generator=generator)
    # All experts are computed in the same way, so a few are enough; the others are not read.
    sample = torch.randperm(spec.experts, generator=generator)[: spec.k + 2]
    index = sample[torch.rand(ROWS, len(sample), generator=generator).topk(spec.k).indices]
    weights = torch.rand(ROWS, spec.k, generator=generator)
    with torch.no_grad():
        ours, theirs = layer(x, index, weights), module(x, index, weights)
    difference, largest = (ours - theirs).abs().max(), theirs.abs().max()
    if ours.shape != theirs.shape or not difference <= TOLERANCE * largest:
        raise FamilyError(
            f"layer {spec.name}: its class {type(module).__name__} does not compute what its "
            f"options describe (max |difference| {difference:.2g}, max |y| {largest:.2g})",
            hint="this version of moexport cannot export this architecture",
        )


def _with_gate(spec: ExpertsSpec, module: Any) -> ExpertsSpec:
    """Returns the spec with the operation between the two products, found by trial."""
    if not module.has_gate:
        return with_activation(spec, module.act_fn, module)
    # The values are large enough for every bound on gate and up to take effect.
    limit = max(map(abs, _numbers(module, "limit")), default=1.0)
    z = 4 * max(1.0, limit) * _test_values(2 * spec.hidden)
    gate: Gate = "concatenated" if module.is_concatenated else "interleaved"
    return _find_spec(replace(spec, gate=gate), module, z, module._apply_gate(z))


def with_activation(spec: ExpertsSpec, act: Any, module: nn.Module) -> ExpertsSpec:
    """Returns the spec of a module's experts, which have the activation `act` and no gate.

    Raises `FamilyError` for an activation that the layer does not support.
    """
    z = 4 * _test_values(spec.hidden)
    return _find_spec(replace(spec, gate="none"), module, z, act(z))


def _test_values(width: int) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))


def _find_spec(spec: ExpertsSpec, module: nn.Module, z: Tensor, expected: Tensor) -> ExpertsSpec:
    """Returns the first candidate that computes `expected` from z."""
    unused = torch.empty(0)
    for candidate in _candidates(spec, module):
        y = Experts(candidate, ExpertsWeights(unused, unused)).activate(z)
        if y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-5):
            return candidate
    raise FamilyError(
        f"layer {spec.name}: what {type(module).__name__} computes between its two products is not "
        "supported",
        hint=f"supported activations are {', '.join(get_args(Activation))} and quick GELU, with "
        "a gate or without; gates may be clamped",
    )


def _candidates(spec: ExpertsSpec, module: nn.Module) -> list[ExpertsSpec]:
    """Returns the specs that a module with the spec's gate may compute, the usual ones first."""
    alphas = [1.0, QUICK_GELU, *_numbers(module, "alpha")]
    functions: list[tuple[Activation, float]] = [("silu", alpha) for alpha in alphas]
    functions += [(name, 1.0) for name in get_args(Activation) if name != "silu"]
    gated = spec.gate != "none"
    limits = [None, *_numbers(module, "limit")] if gated else [None]
    offsets = (0.0, 1.0) if gated else (0.0,)
    return [
        replace(spec, activation=name, alpha=alpha, limit=limit, up_offset=offset)
        for limit, offset, (name, alpha) in itertools.product(limits, offsets, functions)
    ]


def _numbers(module: nn.Module, word: str) -> list[float]:
    """Returns the numbers among the module's attributes whose names contain this word."""
    return [
        float(value)
        for name, value in vars(module).items()
        if word in name and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _post_norm(name: str, norm: Any, width: int) -> tuple[Tensor, float]:
    """Returns the scale that an RMS norm applies before it divides, and its epsilon."""
    names = [name for name in ("eps", "variance_epsilon") if hasattr(norm, name)]
    epsilon = float(getattr(norm, names[0])) if names else 0.0
    if norm.weight.is_meta:  # the norm is only inspected
        return norm.weight, epsilon
    y = _test_values(width)
    with torch.no_grad():
        expected = norm(y)
        for scale in (1.0 + norm.weight, norm.weight):
            scaled = y * scale
            normalized = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + epsilon)
            if torch.allclose(normalized, expected, rtol=1e-4, atol=1e-5):
                return scale, epsilon
    raise FamilyError(
        f"layer {name}: the norm after its experts, {type(norm).__name__}, is not a scale followed "
        "by a division by the root mean square",
        hint="this version of moexport cannot export this architecture",
    )
