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

from ..graphs.layers.base import MoELayer, algorithm_1, choice_key, recorded_choices
from ..graphs.lower import LayerValues
from .model import Model
from .parity import Reference, chunks
from .session import Session, SessionOptions


@torch.no_grad()
def reference(
    model: Model, x: np.ndarray, kept: Mapping[str, int], *, renormalize: bool, batch: int
) -> Reference:
    """Returns what PyTorch computes for inputs x, in batches of `batch`."""
    original = model.original if model.original is not None else model.module
    dense, y = [], []
    specs = {name: layer.spec for name, layer in model.layers.items()}
    choosing = {
        choice_key(name, choice)
        for name, k in kept.items()
        for choice in specs[name].choices()
        if k < specs[name].experts
    }
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
        for name, choice in records.items():
            if name in choosing:
                selected.setdefault(name, []).append(choice.chosen.numpy())
                margin.setdefault(name, []).append(choice.margin.numpy())
    return Reference(
        x=x,
        y=np.concatenate(y),
        dense=np.concatenate(dense),
        selected={name: np.concatenate(sets) for name, sets in selected.items()},
        margin={name: np.concatenate(gaps) for name, gaps in margin.items()},
        kept=dict(kept),
    )


@torch.no_grad()
def first_different_layer(
    model: Model,
    path: Path,
    values: Mapping[str, LayerValues],
    expected: Reference,
    *,
    renormalize: bool,
    rtol: float,
    batch: int,
) -> str:
    """Returns where the first difference appears, in words: a layer, or the network around it.

    The inputs and outputs of every MoE layer are compared in order, on the first `batch` inputs.
    """
    x = expected.x[:batch]
    names = {name for layer in values.values() for name in (layer.input, layer.output)}
    observe = dict.fromkeys(sorted(names), onnx.TensorProto.FLOAT)
    session = Session(path, SessionOptions(plan_memory=False, observe=observe, rounded=True))
    actual = session.run(x, next(iter(expected.kept.values())) if session.takes_k else None)
    seen = _layer_values(model, x, expected.kept, renormalize=renormalize)
    before = "the network before it"
    for name, layer in values.items():
        wanted_input, wanted_output = seen[name]
        if _differs(actual[layer.input], wanted_input, rtol):
            return f"{before}, at the input of layer {name}"
        if _differs(actual[layer.output], wanted_output, rtol):
            return f"layer {name}"
        before = f"the network after layer {name}"
    return f"{before.replace('before it', 'before the layers')}, at the output"


def _layer_values(
    model: Model, x: np.ndarray, kept: Mapping[str, int], *, renormalize: bool
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each MoE layer's input and output in PyTorch, with Algorithm 1."""
    seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any, name: str) -> None:
        assert isinstance(module, MoELayer)
        seen[name] = (module.tokens(args[0]).numpy(), output.numpy())

    with ExitStack() as hooks, algorithm_1(model.module, dict(kept), renormalize=renormalize):
        for name, layer in model.layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
        model.module(torch.from_numpy(np.ascontiguousarray(x)))
    return seen


def _differs(actual: np.ndarray, wanted: np.ndarray, rtol: float) -> bool:
    largest = float(np.abs(wanted).max(initial=0.0))
    return not bool(np.abs(actual - wanted).max(initial=0.0) <= rtol * largest)


def first_output(output: Any) -> torch.Tensor:
    """Returns a backbone's output tensor; published layers give a tuple with auxiliary values."""
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, torch.Tensor)
    return value
