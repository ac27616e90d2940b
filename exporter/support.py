"""How many coefficients of a muMoE layer are not zero, on real inputs: which k changes nothing."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from ..calibration.feeds import Feed
from ..errors import UsageError
from ..graphs.layers.mumoe import MuMoE, mumoe_layers
from .inputs import feed_inputs
from .model import Model

SAMPLES = 256
BATCH = 8


@dataclass(frozen=True, slots=True)
class SupportReport:
    """The non-zero coefficients of one level of one layer, over all tokens of all inputs.

    A k of `max` or more leaves these inputs' outputs as they are.
    """

    layer: str
    level: int
    experts: int
    tokens: int
    mean: float
    p99: float
    max: int


@torch.no_grad()
def support(model: Model, data: Feed, count: int = SAMPLES) -> tuple[SupportReport, ...]:
    """Returns the support of every muMoE layer and level on up to `count` inputs of a feed.

    Raises UsageError for a model without muMoE layers, FeedError for a feed that does not fit.
    """
    layers = mumoe_layers(model.module)
    if not layers:
        raise UsageError(
            f"--data: a {model.family} model has no muMoE layers, whose coefficients could be zero",
            hint="leave --data out; `moexport bench` shows what k costs a Soft MoE",
        )
    x = feed_inputs(model, data, count)
    counts: dict[tuple[str, int], list[np.ndarray]] = {}

    def record(module: nn.Module, args: tuple[torch.Tensor, ...], name: str) -> None:
        assert isinstance(module, MuMoE)
        for level, a in enumerate(module.coefficients(args[0])):
            counts.setdefault((name, level), []).append((a > 0).sum(dim=-1).flatten().numpy())

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(record, name=name)))
        for start in range(0, len(x), BATCH):
            model.module(torch.from_numpy(np.ascontiguousarray(x[start : start + BATCH])))
    return tuple(
        _report(name, level, layers[name].spec.levels[level], np.concatenate(parts))
        for (name, level), parts in counts.items()
    )


def _report(name: str, level: int, experts: int, sizes: np.ndarray) -> SupportReport:
    return SupportReport(
        layer=name,
        level=level + 1,
        experts=experts,
        tokens=len(sizes),
        mean=float(sizes.mean()),
        p99=float(np.percentile(sizes, 99)),
        max=int(sizes.max()),
    )
