"""What takes part in a benchmark: PyTorch in two forms, and exported graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..exporter.model import Model
from ..graphs.layers import Algorithm, recorded_routing
from ..graphs.moe import moe_layers, sharing_weights
from .data import Array
from .results import ONNXRUNTIME, PYTORCH_ALGORITHM_2, PYTORCH_EAGER

Runner = Callable[[Array], Array]
"""Anything that maps inputs [b, ...] to outputs [b, ...]."""


@runtime_checkable
class Graph(Protocol):
    """One exported graph, opened in ONNX Runtime."""

    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, ...] to outputs [b, ...]."""
        ...

    def selected(self, x: Array) -> dict[str, Array]:
        """Returns the chosen experts [b, k] of each MoE layer, by layer name.

        Layers that keep all their experts may be left out: they choose nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class GraphSource:
    """An exported graph that is not opened yet; opening may export or load, and may fail.

    `experts` is n of the model it was made from.
    """

    k: int
    lowering: str
    open: Callable[[], Graph]
    provider: str = "cpu"
    precision: str = "fp32"
    engine: str = ONNXRUNTIME


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure, with the graphs that were made from it.

    `ks` are those of its Algorithm 2 rows in PyTorch; each graph has its own k.
    """

    name: str
    model: Model
    ks: tuple[int, ...] = ()
    graphs: tuple[GraphSource, ...] = ()
    renormalize: bool = False

    @property
    def experts(self) -> int:
        """The largest n of its MoE layers: a k of n keeps every expert of every layer."""
        return max(layer.spec.experts for layer in self.model.layers.values())


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is measured, as plain data: one engine with one k of one model."""

    model: str
    engine: str
    k: int
    experts: int
    provider: str = "cpu"
    precision: str = "fp32"
    lowering: str | None = None

    @property
    def label(self) -> str:
        """A short unique name: `digits: onnxruntime grouped fp32 k=4/16`."""
        words = [self.engine]
        if self.lowering is not None:
            words += [self.lowering, self.precision]
        if self.provider != "cpu":
            words.append(self.provider)
        return f"{self.model}: {' '.join(words)} k={self.k}/{self.experts}"


class PyTorch:
    """A PyTorch module behind numpy: arrays in, arrays out, without gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.inference_mode()
    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, ...] to outputs [b, ...]."""
        output: Tensor = self.module(torch.from_numpy(x))
        result: Array = output.numpy()
        return result

    @torch.inference_mode()
    def with_routing(self, x: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the outputs and the chosen experts [b, k] of each Soft MoE layer."""
        with recorded_routing(self.module) as records:
            output = self(x)
        return output, {name: routing[0].selected.numpy() for name, routing in records.items()}


def untouched(model: Model) -> PyTorch:
    """Returns the model as its user runs it: the factory's own module where there is one."""
    return PyTorch(model.original if model.original is not None else model.module)


def with_algorithm_1(
    model: Model, k: int, algorithm: Algorithm, *, renormalize: bool = False
) -> PyTorch:
    """Returns the model keeping k experts in every layer; its weights are the model's own."""
    module = sharing_weights(model.module)
    for layer in moe_layers(module).values():
        layer.keep = min(k, layer.spec.experts)
        layer.algorithm = algorithm
        layer.renormalize = renormalize
    return PyTorch(module)


def contestants(subject: Subject) -> dict[Contestant, Callable[[], Runner]]:
    """Returns what is measured for a subject, each with the call that opens it.

    The untouched PyTorch model always comes first. Algorithm 2 in PyTorch has no row for k = n,
    where it is the model itself. Raises UsageError for two graphs that no row could tell apart.
    """
    n = subject.experts
    found: dict[Contestant, Callable[[], Runner]] = {
        Contestant(subject.name, PYTORCH_EAGER, n, n): lambda: untouched(subject.model)
    }
    # Algorithm 2 is a loop over a Soft MoE layer's experts: a muMoE layer has nothing to loop over.
    loops = any(m.spec.kind == "soft-moe" for m in subject.model.layers.values())
    for k in subject.ks:
        if k < n and loops:
            found[Contestant(subject.name, PYTORCH_ALGORITHM_2, k, n)] = _algorithm_2(subject, k)
    for graph in subject.graphs:
        spec = Contestant(
            subject.name, graph.engine, graph.k, n, graph.provider, graph.precision, graph.lowering
        )
        if spec in found:
            raise UsageError(
                f"two graphs are the same contestant: {spec.label}",
                hint="give each graph once, or give the two models different names",
            )
        found[spec] = graph.open
    return found


def _algorithm_2(subject: Subject, k: int) -> Callable[[], Runner]:
    return lambda: with_algorithm_1(subject.model, k, "selected", renormalize=subject.renormalize)
