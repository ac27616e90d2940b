"""Records what PyTorch computes, and finds the first layer where a graph differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ..common.files import Reading
from ..graphs.layers.base import MoELayer, algorithm_1, choice_key, recorded_choices
from ..graphs.lower import LayerValues
from .job import ExportJob
from .model import Model
from .parity import Reference, chunks
from .session import Session, SessionOptions


def torch_reference(job: ExportJob, x: np.ndarray) -> Reference:
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
    hook, batch = register_module_forward_hook(count), job.fixed_batch or len(x)
    try:
        return reference(job.model, x, kept, renormalize=job.options.renormalize, batch=batch)
    finally:
        hook.remove()
        reading.end()


@torch.no_grad()
def reference(
    model: Model, x: np.ndarray, kept: Mapping[str, int], *, renormalize: bool, batch: int
) -> Reference:
    """Returns what PyTorch computes for inputs x, in batches of `batch`."""
    original = model.original if model.original is not None else model.module
    specs = {name: layer.spec for name, layer in model.layers.items()}
    choosing = {
        choice_key(name, choice)
        for name, k in kept.items()
        for choice in specs[name].choices()
        if k < specs[name].experts
    }
    dense, y = [], []
    selected: dict[str, list[np.ndarray]] = {}
    margin: dict[str, list[np.ndarray]] = {}
    for part in chunks(x, batch):
        tokens = torch.from_numpy(np.ascontiguousarray(part))
        dense.append(first_output(original(tokens)).numpy())
        with (
            algorithm_1(model.module, dict(kept), renormalize=renormalize),
            recorded_choices(model.module) as records,
        ):
            y.append(first_output(model.module(tokens)).numpy())
        for name in choosing & records.keys():
            selected.setdefault(name, []).append(records[name].chosen.numpy())
            margin.setdefault(name, []).append(records[name].margin.numpy())
    return Reference(
        x=x,
        y=np.concatenate(y),
        dense=np.concatenate(dense),
        selected={name: np.concatenate(selected[name]) for name in records if name in selected},
        margin={name: np.concatenate(margin[name]) for name in records if name in margin},
        kept=dict(kept),
    )


@torch.no_grad()
def first_different_layer(
    job: ExportJob, path: Path, values: Mapping[str, LayerValues], expected: Reference
) -> str:
    """Returns where a graph first differs, in words: a layer, or the network around it.

    The inputs and outputs of every MoE layer are compared in order, on the first inputs.
    """
    model, rtol = job.model, job.options.tolerance.rtol
    x = expected.x[: job.fixed_batch]
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
        model.module(torch.from_numpy(np.ascontiguousarray(x)))
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


def first_output(output: Any) -> torch.Tensor:
    """Returns a backbone's output tensor; published layers give a tuple with auxiliary values."""
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, torch.Tensor)
    return value
