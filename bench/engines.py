"""What takes part in a benchmark: PyTorch in three forms, and exported graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..exporter.load import load
from ..exporter.model import Model
from ..graphs.layers import Algorithm, recorded_routing
from ..graphs.moe import moe_layers, sharing_weights
from ..user_code import names_code
from .data import Array, in_batches
from .int8_host import IntegerLinear
from .results import ONNXRUNTIME, PYTORCH_ALGORITHM_2, PYTORCH_COMPILE, PYTORCH_EAGER

Runner = Callable[[Array], Array]
"""Anything that maps inputs [b, ...] to outputs [b, ...]."""


@runtime_checkable
class Graph(Protocol):
    """One exported graph, opened in its runtime."""

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

    `experts` is n of the model it was made from. Where `open` can be pickled, another process opens
    it too and measures its memory: its method `plain`, if there is one, opens the graph as it is
    deployed, and `profiled(prefix)` with the runtime's own timing of every node. `scope` says what
    a call's time holds, as in `results.Row`.

    `kept` is k by layer where it is not the same in all. Of an INT8 graph the layers in `floating`
    compute in floats all the same, and `integers` are the linear layers of the host that do not.
    """

    k: int
    lowering: str
    open: Callable[[], Runner]
    provider: str = "cpu"
    precision: str = "fp32"
    engine: str = ONNXRUNTIME
    scope: str = "end-to-end"
    kept: Mapping[str, int] = field(default_factory=dict)
    floating: frozenset[str] = frozenset()
    integers: tuple[IntegerLinear, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure, with the graphs that were made from it.

    `ks` are those of its Algorithm 2 rows in PyTorch; each graph has its own k. `engines` are the
    PyTorch engines to measure beside the untouched model, which always takes part.
    """

    name: str
    model: Model
    ks: tuple[int, ...] = ()
    graphs: tuple[GraphSource, ...] = ()
    renormalize: bool = False
    engines: tuple[str, ...] = (PYTORCH_ALGORITHM_2,)

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
    scope: str = "end-to-end"

    @property
    def label(self) -> str:
        """A short unique name: `digits: onnxruntime grouped fp32 k=4/16`."""
        words = [self.engine]
        if self.lowering is not None:
            words += [self.lowering, self.precision]
        if self.provider not in ("cpu", self.engine):
            words.append(self.provider)
        return f"{self.model}: {' '.join(words)} k={self.k}/{self.experts}"


@dataclass(frozen=True, slots=True)
class Entry:
    """How a contestant is opened here, and in another process where `recipe` can be pickled.

    `graph` is the exported graph that it runs, None for PyTorch.
    """

    open: Callable[[], Runner]
    recipe: Callable[[], Runner]
    graph: GraphSource | None = None


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


class CompiledPyTorch:
    """A module under `torch.compile`, for fixed batch sizes: each is compiled at its first call.

    Other sizes run in batches of the largest, filled up at the end: a further compilation takes up
    to a minute, and its kernels would not be those that are timed.
    """

    def __init__(self, module: nn.Module, sizes: Sequence[int]) -> None:
        compiled = torch.compile(module, dynamic=False)
        assert isinstance(compiled, nn.Module)  # a module's compilation is one; its type says less
        self._run = PyTorch(compiled)
        self._sizes = frozenset(sizes)
        self._largest = max(sizes)

    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, ...] to outputs [b, ...]."""
        return in_batches(self._run, x, most=self._largest, takes=self._sizes.__contains__)


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


@dataclass(frozen=True, slots=True)
class TorchForm:
    """One form in which PyTorch runs a model."""

    engine: str
    k: int
    batches: tuple[int, ...]
    renormalize: bool = False

    def of(self, model: Model) -> Runner:
        """Returns the model in this form."""
        if self.engine == PYTORCH_ALGORITHM_2:
            return with_algorithm_1(model, self.k, "selected", renormalize=self.renormalize)
        plain = untouched(model)
        if self.engine == PYTORCH_COMPILE:
            return CompiledPyTorch(plain.module, self.batches)
        return plain


@dataclass(frozen=True)
class TorchRecipe:
    """Loads a model from where it came from, and runs it in a form: for another process."""

    source: str
    weights: str | None
    family: str | None
    config: Mapping[str, Any]
    example: Array | None
    form: TorchForm

    def __call__(self) -> Runner:
        """Loads the model."""
        return self.form.of(
            load(
                self.source,
                family=self.family,
                config=self.config,
                weights=self.weights,
                example=self.example,
            )
        )


@dataclass(frozen=True)
class Held:
    """A model that exists in this process alone."""

    model: Model
    form: TorchForm

    def __call__(self) -> Runner:
        """Returns the model in its form."""
        return self.form.of(self.model)

    def __reduce__(self) -> str:
        raise TypeError("a model without a source cannot be opened by another process")


def contestants(subject: Subject, batches: Sequence[int] = (1,)) -> dict[Contestant, Entry]:
    """Returns what is measured for a subject, each with the calls that open it.

    The untouched PyTorch model always comes first. Algorithm 2 in PyTorch has no row for k = n,
    where it is the model itself. Raises UsageError for two graphs that no row could tell apart.
    """
    n = subject.experts
    sizes = tuple(batches)
    forms = [TorchForm(PYTORCH_EAGER, n, sizes)]
    if PYTORCH_COMPILE in subject.engines:
        forms.append(TorchForm(PYTORCH_COMPILE, n, sizes))
    # Algorithm 2 is a loop over a Soft MoE layer's experts: a muMoE layer has nothing to loop over.
    loops = any(m.spec.kind == "soft-moe" for m in subject.model.layers.values())
    if loops and PYTORCH_ALGORITHM_2 in subject.engines:
        forms += [
            TorchForm(PYTORCH_ALGORITHM_2, k, sizes, subject.renormalize)
            for k in subject.ks
            if k < n
        ]
    found = {
        Contestant(subject.name, form.engine, form.k, n): _torch_entry(subject.model, form)
        for form in forms
    }
    for graph in subject.graphs:
        spec = Contestant(
            *(subject.name, graph.engine, graph.k, n),
            *(graph.provider, graph.precision, graph.lowering, graph.scope),
        )
        if spec in found:
            raise UsageError(
                f"two graphs are the same contestant: {spec.label}",
                hint="give each graph once, or give the two models different names",
            )
        found[spec] = Entry(graph.open, graph.open, graph)
    return found


def _torch_entry(model: Model, form: TorchForm) -> Entry:
    here = Held(model, form)
    source = model.source
    factory = names_code(source.path)
    if not factory and not source.files:
        return Entry(here, here)
    return Entry(
        here,
        TorchRecipe(
            source.path,
            weights=source.weights,
            family=None if factory else model.family,
            config=model.config,
            example=model.example if factory else None,
            form=form,
        ),
    )
