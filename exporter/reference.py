"""Records what PyTorch computes, and finds the first layer where a graph differs from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from ..common.files import Reading
from ..graphs.layers.base import MoELayer, algorithm_1, choice_key, moe_layers, recorded_choices
from ..graphs.layers.experts import Experts
from ..graphs.lower import LayerValues
from .inputs import Inputs, completed
from .job import ExportJob
from .model import Model
from .parity import Reference, chunks
from .session import Session, SessionOptions


def torch_reference(job: ExportJob, x: Inputs) -> Reference:
    """Returns what PyTorch computes for inputs of a job.

    Where k is chosen per run a quarter of the experts are kept. The pages of mapped weights are
    given back on the way.
    """
    # One k serves all layers at run time, so the layer with the fewest experts bounds it.
    shared = min(max(1, layer.spec.experts // 4) for layer in job.model.layers.values())
    kept = {name: shared if k is None else k for name, k in job.k.items()}
    reading = Reading(job.model.source.mapped)

    def count(module: nn.Module, *_: object) -> None:
        lists = (part for part in module.children() if isinstance(part, nn.ParameterList))
        own = (weight for part in (module, *lists) for weight in part.parameters(recurse=False))
        reading.advance(sum(weight.nbytes for weight in own))

    # Of all modules, as a factory's own network keeps its experts where it likes.
    first = x if isinstance(x, np.ndarray) else x[job.model.input.name]
    hook, batch = register_module_forward_hook(count), job.fixed_batch or len(first)
    try:
        return reference(job.model, x, kept, renormalize=job.options.renormalize, batch=batch)
    finally:
        hook.remove()
        reading.end()


@torch.no_grad()
def reference(
    model: Model, x: Inputs, kept: Mapping[str, int], *, renormalize: bool, batch: int
) -> Reference:
    """Returns what PyTorch computes for inputs x, in batches of `batch`."""
    original = model.original if model.original is not None else model.module
    arrays = completed(x, model.inputs)
    specs = {name: layer.spec for name, layer in model.layers.items()}
    choosing = {
        choice_key(name, choice)
        for name, k in kept.items()
        for choice in specs[name].choices()
        if k < specs[name].experts
    }
    dense, outputs = [], []
    selected: dict[str, list[np.ndarray]] = {}
    margin: dict[str, list[np.ndarray]] = {}
    for part in chunks(arrays, batch):
        tensors = [torch.from_numpy(np.ascontiguousarray(each)) for each in part.values()]
        dense.append(first_output(original(*tensors)).numpy())
        with (
            algorithm_1(model.module, dict(kept), renormalize=renormalize),
            recorded_choices(model.module) as records,
            routed_margins(model.module) as margins,
        ):
            found = all_outputs(model.module(*tensors))[: len(model.outputs)]
            outputs.append([each.numpy() for each in found])
        for name in choosing & records.keys():
            chosen, gap = records[name].chosen, margins.get(name, records[name].margin)
            rows = len(tensors[0])
            if len(chosen) != rows:  # of tokens, which the layer sees one after the other
                chosen, gap = chosen.reshape(rows, -1, chosen.shape[-1]), gap.reshape(rows, -1)
            selected.setdefault(name, []).append(chosen.numpy())
            margin.setdefault(name, []).append(gap.numpy())
    first, *further = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
    given = iter(arrays.items())
    _, inputs = next(given)
    return Reference(
        x=inputs,
        y=first,
        dense=np.concatenate(dense),
        selected={name: np.concatenate(selected[name]) for name in records if name in selected},
        margin={name: np.concatenate(margin[name]) for name in records if name in margin},
        kept=dict(kept),
        inputs=dict(given),
        outputs={spec.name: y for spec, y in zip(model.outputs[1:], further, strict=True)},
    )


@contextmanager
def routed_margins(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Within the context, each forward writes by how much token-routed experts were chosen, [t].

    The router is code of the network around the layer. What it ranks is seen as it calls PyTorch's
    `topk` or `max`: the margin of a token is the least gap between the last score that was taken
    and the next, relative to the largest, over all rankings since the layer before.
    """
    margins: dict[str, torch.Tensor] = {}
    layers = {n: m for n, m in moe_layers(module).items() if isinstance(m, Experts)}
    if not layers:
        yield margins
        return
    with _Rankings() as rankings, ExitStack() as hooks:

        def record(_: nn.Module, args: tuple[Any, ...], name: str) -> None:
            margins[name] = rankings.margin(args[1])

        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(record, name=name)))
        yield margins


_LARGEST = (torch.max, torch.Tensor.max, torch.argmax, torch.Tensor.argmax)


class _Rankings(TorchFunctionMode):
    """Keeps what is ranked: the scores and how many of them were taken."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self, function: Any, _: Any, arguments: tuple[Any, ...] = (), given: Any = None
    ) -> Any:
        named = given or {}
        if function in (torch.topk, torch.Tensor.topk):
            taken = arguments[1] if len(arguments) > 1 else named["k"]
            self._seen.append((arguments[0], int(taken)))
        elif function in _LARGEST and (len(arguments) > 1 or "dim" in named):
            self._seen.append((arguments[0], 1))
        return function(*arguments, **named)

    def margin(self, index: torch.Tensor) -> torch.Tensor:
        """Returns [t] for what was chosen, [t, k], and forgets what led to it."""
        least = torch.full(index.shape[:1], torch.inf)
        for scores, taken in self._seen:
            rows = scores.detach().float().reshape(-1, scores.shape[-1])
            if len(rows) != len(index) or not 0 < taken < rows.shape[1]:
                continue
            top = rows.topk(taken + 1).values
            largest = rows.masked_fill(rows.isinf(), 0).abs().amax(dim=-1).clamp(min=1e-30)
            gap = (top[:, taken - 1] - top[:, taken]).nan_to_num(posinf=torch.inf)
            least = torch.minimum(least, gap / largest)
        self._seen.clear()
        return least


@torch.no_grad()
def first_different_layer(
    job: ExportJob, path: Path, values: Mapping[str, LayerValues], expected: Reference
) -> str:
    """Returns where a graph first differs, in words: a layer, or the network around it.

    The inputs and outputs of every MoE layer are compared in order, on the first inputs.
    """
    model, rtol = job.model, job.options.tolerance.rtol
    x = expected.feeds(model.input.name, job.fixed_batch)
    names = {name for layer in values.values() for name in (layer.input, layer.output)}
    observe = dict.fromkeys(sorted(names), onnx.TensorProto.FLOAT)
    session = Session(path, SessionOptions(plan_memory=False, observe=observe, rounded=True))
    actual = session.run(x, next(iter(expected.kept.values())) if session.takes_k else None)
    wanted: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any, name: str) -> None:
        assert isinstance(module, MoELayer)
        wanted[name] = (module.tokens(args[0]).numpy(), output.numpy())

    renormalize = job.options.renormalize
    with (
        ExitStack() as hooks,
        algorithm_1(model.module, {**expected.kept}, renormalize=renormalize),
    ):
        for name, layer in model.layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
        model.module(*(torch.from_numpy(np.ascontiguousarray(each)) for each in x.values()))
    before = "the network before it"
    for name, value in values.items():
        wanted_input, wanted_output = wanted[name]
        if _differs(actual[value.input], wanted_input, rtol):
            return f"{before}, at the input of layer {name}"
        if _differs(actual[value.output], wanted_output, rtol):
            return f"layer {name}"
        before = f"the network after layer {name}"
    return f"{before.replace('before it', 'before the layers')}, at the output"


def _differs(actual: np.ndarray, wanted: np.ndarray, rtol: float) -> bool:
    largest = float(np.abs(wanted).max(initial=0.0))
    return not bool(np.abs(actual - wanted).max(initial=0.0) <= rtol * largest)


def all_outputs(output: Any) -> tuple[torch.Tensor, ...]:
    """Returns a backbone's output tensors; what is no tensor of a tuple is left out."""
    values = output if isinstance(output, tuple) else (output,)
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def first_output(output: Any) -> torch.Tensor:
    """Returns a backbone's output tensor; published layers give a tuple with auxiliary values."""
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, torch.Tensor)
    return value
