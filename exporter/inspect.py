"""What a model is, before it is exported: its layers, its sizes and what each k costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..data.feeds import Feed, rebatched
from ..errors import UsageError
from ..graphs.layers.base import MoELayer, MoESpec, choice_key, recorded_choices, replaced_layers
from .inputs import DEFAULT_TOKENS, feed_inputs
from .model import Model

SHARES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One MoE layer: sizes, and the tokens it sees for one input."""

    name: str
    experts: int
    slots: int
    dim: int
    hidden: int
    out: int
    tokens: int
    parameters: int


@dataclass(frozen=True, slots=True)
class CostReport:
    """What keeping a share of the experts costs, over all MoE layers and for one input.

    `macs` counts router, dispatch, experts and combine; `expert_bytes` the FP32 weights of the
    experts kept, which is what a run at batch 1 must read.
    """

    k: str
    macs: int
    expert_bytes: int
    macs_share: float
    bytes_share: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The result of `moexport inspect`."""

    family: str
    config: dict[str, Any]
    input: str
    output: str
    parameters: int
    moe_parameters: int
    layers: tuple[LayerReport, ...]
    costs: tuple[CostReport, ...]
    notes: tuple[str, ...]
    support: tuple[SupportReport, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def inspect(model: Model, data: Feed | None = None) -> ModelReport:
    """Returns the report for a loaded model.

    Reads no weights and runs nothing, unless there is `data` to count a muMoE's coefficients on.
    """
    tokens = token_counts(model)
    # Of a user's own network the data are the example first: it need not have muMoE layers.
    mixing = any(layer.spec.rewritable for layer in model.layers.values())
    counted = mixing or not model.host.own_code
    layers = tuple(
        LayerReport(
            name=name,
            experts=layer.spec.experts,
            slots=layer.spec.slots,
            dim=layer.spec.dim,
            hidden=layer.spec.hidden,
            out=layer.spec.out,
            tokens=tokens[name],
            parameters=_parameters(layer),
        )
        for name, layer in model.layers.items()
    )
    return ModelReport(
        family=model.family,
        config=dict(model.config),
        input=", ".join(_port(spec.name, spec.shape) for spec in model.inputs),
        output=", ".join(_port(spec.name, spec.shape) for spec in model.outputs),
        parameters=_parameters(model.module),
        moe_parameters=sum(layer.parameters for layer in layers),
        layers=layers,
        costs=_costs(model, tokens),
        notes=model.notes,
        support=support(model, data) if counted and data is not None else (),
    )


def token_counts(model: Model, dynamic: int = DEFAULT_TOKENS.opt) -> dict[str, int]:
    """Returns the tokens m that each layer sees for one input.

    A dynamic token axis counts as `dynamic` tokens. The backbone runs on zeros, in place of its
    inputs and of its weights, none of which is read; its MoE layers and its products do not run.
    """
    side = max(1, round(dynamic**0.5))
    tokens_limit = model.input.limits.get("tokens", dynamic)
    if model.host.of_tokens:
        return dict.fromkeys(model.layers, min(dynamic, tokens_limit))
    sizes = {
        "batch": model.batch_of,
        "tokens": min(dynamic, tokens_limit),
        "height": side,
        "width": side,
    }
    examples = tuple(
        torch.zeros(spec.concrete(sizes), dtype=getattr(torch, spec.dtype)) for spec in model.inputs
    )
    tokens: dict[str, int] = {}

    class Counted(nn.Module):
        def __init__(self, name: str, layer: MoELayer) -> None:
            super().__init__()
            self.name, self.spec, self.tokens = name, layer.spec, layer.tokens

        def forward(self, x: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
            del routed
            x = self.tokens(x)
            tokens[self.name] = x.shape[-2] // (model.batch_of if x.ndim == 2 else 1)
            return x.new_zeros(*x.shape[:-1], self.spec.out)

    with torch.inference_mode(), replaced_layers(model.module, Counted) as backbone, _NoProducts():
        # One zero in memory for each, seen as a tensor of any shape. On PyTorch's meta device the
        # backbone would not be computed at all, but importing what that needs takes a second.
        zeros = {
            name: torch.zeros(()).expand(tensor.shape)
            for name, tensor in (*backbone.named_parameters(), *backbone.named_buffers())
            if tensor.is_floating_point()
        }
        functional_call(backbone, zeros, examples)
    return tokens


class _NoProducts(TorchFunctionMode):
    """Zeros of the right shape in place of matrix products, which take most of a backbone's time.

    The rest runs as it is, with less to load than PyTorch's meta device has.
    """

    def __torch_function__(
        self, function: Any, _: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        if function is nn.functional.linear and len(arguments) > 1:
            x, weight, *_ = arguments
            return x.new_zeros(*x.shape[:-1], *weight.shape[:-1])
        if function is nn.functional.scaled_dot_product_attention and len(arguments) > 2:
            query, _, value, *_ = arguments
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        return function(*arguments, **(keywords or {}))


def _costs(model: Model, tokens: dict[str, int]) -> tuple[CostReport, ...]:
    specs = {name: layer.spec for name, layer in model.layers.items()}
    reports: list[CostReport] = []
    for label, kept in _kept(specs):
        macs = sum(sum(spec.macs(tokens[n], kept[n]).values()) for n, spec in specs.items())
        nbytes = sum(spec.bytes_read(kept[name]) for name, spec in specs.items())
        all_macs = reports[0].macs if reports else macs
        all_bytes = reports[0].expert_bytes if reports else nbytes
        reports.append(
            CostReport(
                k=label,
                macs=macs,
                expert_bytes=nbytes,
                macs_share=macs / all_macs,
                bytes_share=nbytes / all_bytes,
            )
        )
    return tuple(reports)


def _kept(specs: Mapping[str, MoESpec]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yields labels, and the k of each layer: all experts, and shares of those that are trained."""
    trained = {name: spec.trained_k for name, spec in specs.items()}
    every = {name: spec.experts for name, spec in specs.items()}
    what = "n"
    if trained != every:
        yield _k_label("n", every), every
        what = "trained k"
    for share in (fraction for fraction in SHARES if fraction <= min(trained.values())):
        kept = {name: max(1, k // share) for name, k in trained.items()}
        yield _k_label(what if share == 1 else f"{what}/{share}", kept), kept


def _k_label(what: str, kept: dict[str, int]) -> str:
    values = sorted(set(kept.values()))
    number = str(values[0]) if len(values) == 1 else f"{values[0]}–{values[-1]}"
    return f"{what} = {number}"


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _port(name: str, shape: tuple[int | str, ...]) -> str:
    return f"{name} ({', '.join(str(size) for size in shape)})"


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
    """Returns the support of every layer that mixes experts by coefficients, level by level.

    Over up to `count` inputs of a feed. Raises UsageError for a model without such layers,
    FeedError for a feed that does not fit.
    """
    specs = {name: layer.spec for name, layer in model.layers.items() if layer.spec.rewritable}
    if not specs:
        raise UsageError(
            f"--data: a {model.family} model has no muMoE layers, whose coefficients could be zero",
            hint="leave --data out; `moexport bench` shows what k costs a Soft MoE",
        )
    x = feed_inputs(model, data, count)
    counts: dict[tuple[str, int], list[np.ndarray]] = {}
    for part in rebatched([x], BATCH):
        with recorded_choices(model.module) as records:
            model.module(*(torch.from_numpy(np.ascontiguousarray(each)) for each in part.values()))
        for name, spec in specs.items():
            for level, choice in enumerate(spec.choices()):
                sizes = (records[choice_key(name, choice)].chosen > 0).sum(dim=-1)
                counts.setdefault((name, level), []).append(sizes.flatten().numpy())
    return tuple(
        _report(name, level, specs[name].levels[level], np.concatenate(parts))
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
