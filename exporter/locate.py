"""Finds the layer in which a graph and its PyTorch model part ways."""

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

from ..graphs.layers.base import MoELayer, algorithm_1
from ..graphs.lower import LayerValues
from .model import Model
from .parity import Reference
from .session import Session, SessionOptions


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
