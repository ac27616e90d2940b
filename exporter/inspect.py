"""Describes a model before its export: its layers, its sizes and the cost of each k."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..common.option import takes
from ..common.text import by_level
from ..data.batches import Feed, rebatched
from ..errors import UsageError
from ..graphs.k import share_of
from ..graphs.layers.base import MoELayer, MoESpec, choice_key, recorded_choices, replaced_layers
from ..graphs.layers.mumoe import MuMoESpec
from ..graphs.sizes import DEFAULT_TOKENS
from .checkpoints.load import AnyModel, model_of
from .inputs import feed_inputs, shape_text
from .model import Model
from .refusals import TOKEN_AXES
from .requests import InspectRequest

DENOMINATORS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One MoE layer: sizes, and the tokens it processes for one input.

    A muMoE layer also has the experts of each level, their number of `combinations`, the form and
    `ranks` of each tensor, and `expert_rank`, the largest rank that an expert's matrix can have
    (Table 5 of the muMoE paper).
    """

    name: str
    experts: int
    slots: int
    dim: int
    hidden: int
    out: int
    tokens: int
    parameters: int
    levels: tuple[int, ...] = ()
    combinations: int | None = None
    form: str | None = None
    ranks: tuple[tuple[int, ...], ...] = ()
    expert_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A layer in one form: its parameters, and its multiply-adds for one token.

    `form` is one of these: the layer's own; one level with as many experts and the same ranks; a
    matrix for each expert (dense); a linear layer without experts (muMoE, Tables 4 and 10, Fig. 8).
    """

    layer: str
    form: str
    parameters: int
    macs: int


@dataclass(frozen=True, slots=True)
class CostReport:
    """The cost of keeping a share of the experts, over all MoE layers and for one input.

    `macs` counts router, dispatch, experts and combine; `expert_bytes` counts the FP32 weights of
    the kept experts, which a run at batch 1 must read.
    """

    k: str
    macs: int
    expert_bytes: int
    macs_share: float
    bytes_share: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The result of `moexport inspect`.

    `macs` are the multiply-adds of the whole model for one input (None if unknown),
    `moe_macs` those of its MoE layers with their trained k.
    """

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
    macs: int | None = None
    moe_macs: int = 0
    equivalents: tuple[Equivalent, ...] = ()
    answers: tuple[str, ...] = ()
    """The untouched model's accuracy on labels, or its distance from the user's own model."""

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return asdict(self)


@takes(InspectRequest)
def inspect(model: AnyModel, options: InspectRequest) -> ModelReport:
    """Describes a model before its export: its layers, its sizes, the cost of each k.

    `model` is a loaded model, or an argument of `load`, of which only the shapes are read.
    """
    data = options.data
    loading = replace(options, values=data is not None)
    return _report_on(model_of(model, loading, data), data, options.tokens)


def _report_on(model: Model, data: Feed | None, tokens: int | None) -> ModelReport:
    """Returns the report on a loaded model; `tokens` is the length of its inputs if it varies.

    Reads no weights and runs nothing without `data`. With data, accuracy is measured on labels,
    outputs of the user's own model are compared, and a muMoE's coefficients are counted.

    Raises what `answers_of` raises, and `UsageError` for data without labels or outputs.
    """
    counted_tokens, backbone_macs = _count_one_input(model, tokens)
    answers: tuple[str, ...] = ()
    if data is not None:
        from .checks.answers import answer_sentences, answers_of  # loaded only for a run

        found = answers_of(model, data)
        answers = () if found is None else tuple(answer_sentences(found, model))
    # For a user's own network, data may serve only as its example: muMoE layers are not needed.
    has_coefficients = any(layer.spec.rewritable for layer in model.layers.values())
    counts_coefficients = has_coefficients or (not answers and not model.host.own_code)
    layers = tuple(
        _layer_report(name, layer, counted_tokens[name]) for name, layer in model.layers.items()
    )
    moe_macs = sum(
        sum(layer.spec.macs(counted_tokens[name], layer.spec.trained_k).values())
        for name, layer in model.layers.items()
    )
    return ModelReport(
        family=model.family,
        config=dict(model.config),
        input=", ".join(f"{spec.name} {shape_text(spec.shape)}" for spec in model.inputs),
        output=", ".join(f"{spec.name} {shape_text(spec.shape)}" for spec in model.outputs),
        parameters=_parameters(model.module),
        moe_parameters=sum(layer.parameters for layer in layers),
        layers=layers,
        costs=_costs(model, counted_tokens),
        notes=model.notes,
        support=support(model, data) if counts_coefficients and data is not None else (),
        macs=None if backbone_macs is None else backbone_macs + moe_macs,
        moe_macs=moe_macs,
        equivalents=tuple(_equivalents(model)),
        answers=answers,
    )


def _layer_report(name: str, layer: MoELayer, tokens: int) -> LayerReport:
    spec = layer.spec
    report = LayerReport(
        name=name,
        experts=spec.experts,
        slots=spec.slots,
        dim=spec.dim,
        hidden=spec.hidden,
        out=spec.out,
        tokens=tokens,
        parameters=_parameters(layer),
    )
    if not isinstance(spec, MuMoESpec):
        return report
    return replace(
        report,
        levels=spec.levels,
        combinations=spec.tensors[0].combinations,
        form=spec.form,
        ranks=tuple(tensor.ranks for tensor in spec.tensors),
        expert_rank=max(tensor.expert_rank for tensor in spec.tensors),
    )


def _equivalents(model: Model) -> Iterator[Equivalent]:
    """Yields each muMoE layer in its own form, and in those that the paper compares it with."""
    for name, layer in model.layers.items():
        spec = layer.spec
        if not isinstance(spec, MuMoESpec) or not spec.levels:
            continue
        forms = {"as it is": spec}
        if len(spec.levels) > 1:
            forms["one level"] = spec.one_level
        if spec.form != "full":
            forms["dense"] = spec.dense
        for form, counterpart in forms.items():
            macs = sum(counterpart.macs(1, counterpart.experts).values())
            yield Equivalent(name, form, counterpart.parameters, macs)
        linear = sum(tensor.modes[-2] * tensor.out for tensor in spec.tensors)
        yield Equivalent(name, "linear", linear, linear)


def _count_one_input(model: Model, tokens: int | None) -> tuple[dict[str, int], int | None]:
    """Counts the tokens of each layer for one input, and the rest of the network's multiply-adds.

    Raises `UsageError` for a number of tokens that the model does not accept.
    """
    shape, limits = model.input.shape, model.input.limits
    if tokens is None:
        # A vector is one token if arrays may omit the token axis.
        tokens = 1 if model.input.implied == "tokens" else DEFAULT_TOKENS.opt
    elif TOKEN_AXES.isdisjoint(shape) and not model.host.per_token:
        raise UsageError(
            f"--tokens {tokens}: the model's inputs, {shape}, have no token axis",
            hint="leave --tokens out",
        )
    elif tokens > limits.get("tokens", tokens):
        raise UsageError(
            f"--tokens {tokens}: the model accepts at most {limits['tokens']}",
            hint=f"use --tokens {limits['tokens']} or fewer",
        )
    tokens = min(tokens, limits.get("tokens", tokens))
    if model.host.per_token:
        return dict.fromkeys(model.layers, tokens), None
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, _SkippedProducts() as products:
        counts = _tokens_by_layer(model, tokens)
    total = products.macs + counter.get_total_flops() // 2
    return counts, total // model.batch_of


def _tokens_by_layer(model: Model, count: int) -> dict[str, int]:
    """Returns the tokens of each layer for inputs of `count` tokens or pixels.

    The backbone runs on zeros instead of its inputs and weights, which are not read; its MoE layers
    do not run.
    """
    height = next(h for h in range(math.isqrt(count), 0, -1) if count % h == 0)
    sizes = {"batch": model.batch_of, "tokens": count, "height": height, "width": count // height}
    tokens: dict[str, int] = {}

    class TokenCounter(nn.Module):
        def __init__(self, name: str, layer: MoELayer) -> None:
            super().__init__()
            self.name, self.spec, self.tokens = name, layer.spec, layer.tokens

        def forward(self, x: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x)
            tokens[self.name] = x.shape[-2] // (model.batch_of if x.ndim == 2 else 1)
            return x.new_zeros(*x.shape[:-1], self.spec.out)

    with torch.inference_mode(), replaced_layers(model.module, TokenCounter) as backbone:
        # Each tensor is a single zero in memory, expanded to the tensor's shape. PyTorch's meta
        # device would avoid computing the backbone, but its imports take a second.
        zeros = {
            name: torch.zeros(()).expand(tensor.shape)
            for name, tensor in (*backbone.named_parameters(), *backbone.named_buffers())
            if tensor.is_floating_point()
        }
        functional_call(backbone, zeros, model.zeros(sizes))
    return tokens


class _SkippedProducts(TorchFunctionMode):
    """Replaces matrix products, which take most of a backbone's time, with zeros of the same shape.

    The rest runs unchanged; this imports less than PyTorch's meta device. `macs` counts the
    multiply-adds that were skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_function__(
        self, function: Any, _: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        if function is nn.functional.linear and len(arguments) > 1:
            x, weight, *_ = arguments
            y = x.new_zeros(*x.shape[:-1], *weight.shape[:-1])
            self.macs += y.numel() * weight.shape[-1]
            return y
        if function is nn.functional.scaled_dot_product_attention and len(arguments) > 2:
            query, _, value, *_ = arguments
            y = query.new_zeros(*query.shape[:-1], value.shape[-1])
            scores = query.shape[:-1].numel() * value.shape[-2]
            self.macs += scores * (query.shape[-1] + value.shape[-1])
            return y
        return function(*arguments, **(keywords or {}))


def _costs(model: Model, tokens: dict[str, int]) -> tuple[CostReport, ...]:
    specs = model.specs
    reports: list[CostReport] = []
    for label, share, kept in _choices_of_k(specs):
        kept_specs = {name: _with_share(spec, share) for name, spec in specs.items()}
        macs = sum(sum(spec.macs(tokens[n], kept[n]).values()) for n, spec in kept_specs.items())
        nbytes = sum(spec.bytes_read(kept[name]) for name, spec in kept_specs.items())
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


def _with_share(spec: MoESpec, share: Fraction) -> MoESpec:
    """Returns the spec of a layer that keeps a share of each of its levels."""
    if not isinstance(spec, MuMoESpec) or len(spec.levels) < 2 or share == 1:
        return spec
    return replace(spec, kept=tuple(share_of(share, n) for n in spec.levels))


def _choices_of_k(specs: Mapping[str, MoESpec]) -> Iterator[tuple[str, Fraction, dict[str, int]]]:
    """Yields labels, shares and the k of each layer: all experts, and shares of the trained k.

    An export with such a share as its `--k` has the same k.
    """
    trained = {name: spec.trained_k for name, spec in specs.items()}
    all_experts = {name: spec.experts for name, spec in specs.items()}
    label = "n"
    if trained != all_experts:
        yield _k_label("n", all_experts, specs), Fraction(1), all_experts
        label = "trained k"
    for denominator in (n for n in DENOMINATORS if n <= min(trained.values())):
        share = Fraction(1, denominator)
        kept = {name: share_of(share, k) for name, k in trained.items()}
        kept_specs = {name: _with_share(spec, share) for name, spec in specs.items()}
        name = label if denominator == 1 else f"{label}/{denominator}"
        yield _k_label(name, kept, kept_specs), share, kept


def _k_label(label: str, kept: dict[str, int], specs: Mapping[str, MoESpec]) -> str:
    by_levels = {
        by_level(spec.k_by_level(kept[name])) if isinstance(spec, MuMoESpec) else str(kept[name])
        for name, spec in specs.items()
        if spec.levels
    }
    if len(by_levels) == 1:
        return f"{label} = {by_levels.pop()}"
    values = sorted(set(kept.values()))
    number = str(values[0]) if len(values) == 1 else f"{values[0]}–{values[-1]}"
    return f"{label} = {number}"


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


SAMPLES = 256
BATCH = 8


@dataclass(frozen=True, slots=True)
class SupportReport:
    """The non-zero coefficients of one level of one layer, over all tokens of all inputs.

    A k of `max` or more does not change the outputs for these inputs.
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
    """Returns the support of each layer that mixes experts by coefficients, level by level.

    Up to `count` inputs of a feed are used. Raises UsageError for a model without such layers, and
    FeedError for a feed that does not fit.
    """
    specs = {name: spec for name, spec in model.specs.items() if spec.rewritable}
    if not specs:
        raise UsageError(
            "--data: nothing to measure: the data have neither labels nor outputs of your own "
            f"model, and {model.family} has no muMoE layers, whose coefficients could be counted",
            hint="add an array 'label' or 'output'; `moexport bench` shows what k costs a Soft MoE",
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
        SupportReport(
            layer=name,
            level=level + 1,
            experts=specs[name].levels[level],
            tokens=len(sizes),
            mean=float(sizes.mean()),
            p99=float(np.percentile(sizes, 99)),
            max=int(sizes.max()),
        )
        for (name, level), parts in counts.items()
        for sizes in [np.concatenate(parts)]
    )
