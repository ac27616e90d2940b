"""Sparse blocks whose experts are separate modules: Switch Transformers and NLLB-MoE.

They do not use the experts interface of `transformers`. Each block is a router and a dict of
experts. The router stays as it is in the library, with its capacity. Here its masks become an index
and weights, and the experts become our layer. A token has weight zero if it is beyond its expert's
capacity, or if it is padding and the router skips padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import FamilyError
from .experts import ROWS, TOLERANCE, with_activation
from .layers.experts import Experts, ExpertsSpec, ExpertsWeights


class SparseBlock(nn.Module):
    """Replaces a sparse block of the library: the same router with our experts.

    `experts` has the same path as the library's experts.
    """

    def __init__(self, block: Any, experts: Experts) -> None:
        super().__init__()
        self.router = block.router
        self.experts = experts
        self.spec = experts.spec  # during tracing, another module replaces the experts

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Maps tokens [b, m, d] to the same shape."""
        index, weights = self.selected_experts(x, padding)
        y: Tensor = self.experts(x.reshape(-1, x.shape[-1]), index, weights)
        return y.reshape(x.shape)

    def selected_experts(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the index and the weights, both [b·m, k]."""
        raise NotImplementedError


class _Switch(SparseBlock):
    """Sends each token to one expert while that has room; the capacity applies to each input."""

    def __init__(self, block: Any, experts: Experts) -> None:
        super().__init__(block, experts)
        self.router.classifier = _Converted(block.router)

    def selected_experts(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        del padding
        mask, probability, _ = self.router(x)  # [b, m, n] with at most one 1 in a row, [b, m, 1]
        # Not argmax, since a row without a 1 has no maximum.
        index = (mask * torch.arange(self.spec.experts)).sum(dim=-1)
        weights = probability * mask.sum(dim=-1, keepdim=True)
        return index.reshape(-1, 1), weights.reshape(-1, 1)


class _Converted(nn.Module):
    """A router's classifier, already in the type to which the router converts it in each forward.

    A forward that converts weights, even to their own type, cannot be traced.
    """

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.linear = router.classifier.to(router.dtype)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits

    def to(self, *_: Any, **__: Any) -> Any:
        return self


class _Nllb(SparseBlock):
    """Sends each token to two experts and scales their sum by the share that training kept."""

    def __init__(self, block: Any, experts: Experts) -> None:
        super().__init__(block, experts)
        self.scale = 1.0 - block.experts.moe_token_dropout
        router = block.router
        if router.second_expert_policy != "all":
            raise FamilyError(
                f"layer {experts.spec.name}: its router selects the second expert at random "
                f"(second_expert_policy '{router.second_expert_policy}'), at inference as well",
                hint='set "second_expert_policy": "all" in config.json',
            )
        fraction = router.moe_eval_capacity_token_fraction
        if not fraction >= 1:
            room = f"{fraction:g} of the tokens of a batch"
            if fraction <= 0:
                room = "expert_capacity tokens of a batch"
            raise FamilyError(
                f"layer {experts.spec.name}: an expert has room for {room} "
                f"(moe_eval_capacity_token_fraction {fraction:g}), so the result for one input "
                "depends on the other inputs in the batch",
                hint='set "moe_eval_capacity_token_fraction": 1.0 in config.json, which drops '
                "no tokens",
            )

    def selected_experts(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        _, gates, _ = self.router(x.reshape(-1, x.shape[-1]), padding)  # [t, n], two nonzero
        # Stable, like ONNX's TopK: of several zeros the first is taken.
        values, index = gates.sort(dim=-1, descending=True, stable=True)
        k = self.spec.k
        return index[:, :k], values[:, :k] * self.scale


_BLOCKS: Mapping[str, tuple[str, str, int, type[SparseBlock]]] = MappingProxyType(
    {
        "SwitchTransformersSparseMLP": ("wi", "wo", 1, _Switch),
        "NllbMoeSparseMLP": ("fc1", "fc2", 2, _Nllb),
    }
)
"""For each class of sparse blocks: the names of an expert's two maps, the number of experts of a
token, and the class that replaces the block."""


def sparse_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the sparse blocks of a network whose experts are separate modules, by path."""
    return {
        name: module for name, module in network.named_modules() if type(module).__name__ in _BLOCKS
    }


def canonical_block(path: str, block: Any) -> SparseBlock:
    """Returns the replacement of a sparse block; its weights are views of the block's.

    Raises `FamilyError` for an activation that the layer does not support, and for a router whose
    result is random or depends on the rest of the batch.
    """
    first_name, second_name, k, replacement = _BLOCKS[type(block).__name__]
    experts = _experts(block)
    first = [getattr(expert, first_name) for expert in experts]
    second = [getattr(expert, second_name) for expert in experts]
    hidden, d = first[0].weight.shape
    out = second[0].weight.shape[0]
    spec = ExpertsSpec(
        name=f"{path}.experts", experts=len(experts), k=k, dim=d, hidden=hidden, out=out
    )
    weights = ExpertsWeights(
        w1=tuple(linear.weight.T for linear in first),
        w2=tuple(linear.weight.T for linear in second),
        b1=_biases(first),
        b2=_biases(second),
    )
    return replacement(block, Experts(with_activation(spec, experts[0].act, block), weights))


def check_block(path: str, ours: SparseBlock, block: nn.Module) -> bool:
    """Returns whether the library's block agrees with ours on random values; reads the weights.

    Raises `FamilyError` if one of our experts does not compute what the library's does.
    """
    spec, generator = ours.experts.spec, torch.Generator().manual_seed(0)
    x = torch.randn(1, ROWS, spec.dim, generator=generator)
    experts = _experts(block)
    with torch.no_grad():
        index, weights = ours.selected_experts(x, None)
        y = ours(x)
        expected = torch.stack(
            [
                sum(weight * experts[e](row) for e, weight in zip(chosen, row_weights, strict=True))
                for row, chosen, row_weights in zip(x[0], index.tolist(), weights, strict=True)
            ]
        )
        theirs = block(x)
    bound = TOLERANCE * expected.abs().max()
    difference = (y[0] - expected).abs().max()
    if not difference <= bound:
        raise FamilyError(
            f"layer {path}: the experts of {type(block).__name__} do not compute what their "
            f"options describe (max |difference| {difference:.2g})",
            hint="the architecture cannot be exported with this version",
        )
    return bool((y - theirs).abs().max() <= bound)


def _experts(block: Any) -> list[Any]:
    return [block.experts[f"expert_{index}"] for index in range(block.experts.num_experts)]


def _biases(maps: list[Any]) -> Tensor | None:
    return None if maps[0].bias is None else torch.stack([linear.bias for linear in maps])
