"""What takes part in a benchmark: PyTorch in three forms, on CPU and GPU, and exported graphs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...common.user_code import names_code
from ...errors import UsageError
from ...exporter.checkpoints.load import load
from ...exporter.model import Model
from ...graphs.layers.base import moe_layers, sharing_weights
from ...graphs.layers.soft_moe import Algorithm, recorded_routing
from ..data import Array, in_batches
from ..measure.roofline import IntegerLinear
from ..results import ONNXRUNTIME, PYTORCH_ALGORITHM_2, PYTORCH_COMPILE, PYTORCH_EAGER
from .available import KINDS, EngineKind

CUDA = "cuda"
"""The provider of rows on an NVIDIA GPU, as PyTorch calls the device."""


class PyTorchOnGpu:
    """A module that lies on the GPU behind numpy: arrays in, arrays out, on a stream of its own.

    Memory comes from PyTorch's allocator, which keeps what earlier calls have used for later ones.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, ...] to outputs [b, ...]; waits until they are here."""
        with torch.cuda.stream(self._stream):
            output: Tensor = self.module(torch.from_numpy(x).to(CUDA))
            result: Array = output.cpu().numpy()
        return result

    @torch.inference_mode()
    def device_ms(self, x: Array) -> float:
        """Returns the GPU's time for inputs [b, ...]: between two events, copies left out."""
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        with torch.cuda.stream(self._stream):
            inputs = torch.from_numpy(x).to(CUDA)
            begin.record()
            self.module(inputs)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def on_device(model: Model, device: str) -> Model:
    """Returns a copy of a model whose weights lie on another device; the model stays as it is.

    What its module and its original share, their copies share too.
    """
    modules = [model.module] if model.original is None else [model.module, model.original]
    # In the memo of a deep copy each tensor stands for its copy there, so that none is made here.
    memo: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters():
            memo.setdefault(
                id(parameter), nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            )
        for buffer in module.buffers():
            memo.setdefault(id(buffer), buffer.to(device))
    copies = [copy.deepcopy(module, memo) for module in modules]
    return replace(model, module=copies[0], original=copies[1] if len(copies) > 1 else None)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Within the context PyTorch computes FP32 products in FP32 on a GPU, as other engines do.

    By default it rounds the factors of convolutions to TF32 there: 10 bits of mantissa.
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


Runner = Callable[[Array], Array]
"""Anything that maps inputs [b, ...] to outputs [b, ...].

One with a method `device_ms` returns by it the milliseconds that its device takes for inputs.
"""


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
    compute in floats all the same, and `integers` are the linear layers of the backbone that do
    not.
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
class Candidate:
    """A model to measure, with the graphs that were made from it.

    `ks` are those of its Algorithm 2 rows in PyTorch; each graph has its own k. `engines` are the
    PyTorch engines to measure, by their names in `available.KINDS`, beside the untouched model,
    which always takes part.
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
class Case:
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
    """How a case is opened here, and in another process where `recipe` can be pickled.

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

    def __init__(
        self,
        module: nn.Module,
        sizes: Sequence[int],
        run: Callable[[nn.Module], Runner] = PyTorch,
    ) -> None:
        compiled = torch.compile(module, dynamic=False)
        assert isinstance(compiled, nn.Module)  # a module's compilation is one; its type says less
        self._run = run(compiled)
        self.device_ms: Callable[[Array], float] | None = getattr(self._run, "device_ms", None)
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
    """One form in which PyTorch runs a model: on the CPU or, by the provider `cuda`, on a GPU."""

    engine: str
    k: int
    batches: tuple[int, ...]
    renormalize: bool = False
    provider: str = "cpu"

    def of(self, model: Model) -> Runner:
        """Returns the model, which lies where the form runs it, in this form."""
        run: Callable[[nn.Module], Runner] = PyTorchOnGpu if self.provider == CUDA else PyTorch
        if self.engine == PYTORCH_ALGORITHM_2:
            selecting = with_algorithm_1(model, self.k, "selected", renormalize=self.renormalize)
            return run(selecting.module)
        module = untouched(model).module
        if self.engine == PYTORCH_COMPILE:
            return CompiledPyTorch(module, self.batches, run)
        return run(module)


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
        model = load(
            self.source,
            family=self.family,
            config=self.config,
            weights=self.weights,
            example=self.example,
        )
        return self.form.of(on_device(model, CUDA) if self.form.provider == CUDA else model)


@dataclass(frozen=True)
class Held:
    """A model that exists in this process alone; `place` returns it where the form runs it."""

    place: Callable[[], Model]
    form: TorchForm

    def __call__(self) -> Runner:
        """Returns the model in its form."""
        return self.form.of(self.place())

    def __reduce__(self) -> str:
        raise TypeError("a model without a source cannot be opened by another process")


def cases(candidate: Candidate, batches: Sequence[int] = (1,)) -> dict[Case, Entry]:
    """Returns what is measured for a candidate, each with the calls that open it.

    The untouched PyTorch model always comes first. Algorithm 2 in PyTorch has no row for k = n,
    where it is the model itself. Raises UsageError for two graphs that no row could tell apart.
    """
    n = candidate.experts
    places: dict[str, Callable[[], Model]] = {
        "cpu": lambda: candidate.model,
        # One copy on the GPU, made when it is first needed, for all who run it there.
        CUDA: functools.cache(lambda: on_device(candidate.model, CUDA)),
    }
    asked = {PYTORCH_EAGER, *candidate.engines}
    found = {
        Case(candidate.name, form.engine, form.k, n, form.provider): _torch_entry(
            candidate.model, places[form.provider], form
        )
        for kind in KINDS.values()
        if kind.name in asked
        for form in _torch_forms(candidate, kind, tuple(batches))
    }
    for graph in candidate.graphs:
        spec = Case(
            *(candidate.name, graph.engine, graph.k, n),
            *(graph.provider, graph.precision, graph.lowering, graph.scope),
        )
        if spec in found:
            raise UsageError(
                f"two graphs are the same case: {spec.label}",
                hint="give each graph once, or give the two models different names",
            )
        found[spec] = Entry(graph.open, graph.open, graph)
    return found


def _torch_forms(
    candidate: Candidate, kind: EngineKind, batches: tuple[int, ...]
) -> Iterator[TorchForm]:
    """The rows of an engine; none for one that runs graphs."""
    n = candidate.experts
    if kind.engine in (PYTORCH_EAGER, PYTORCH_COMPILE):
        yield TorchForm(kind.engine, n, batches, provider=kind.provider)
    # Algorithm 2 is a loop over a Soft MoE layer's experts: a muMoE layer has nothing to loop over.
    loops = any(m.spec.kind == "soft-moe" for m in candidate.model.layers.values())
    if loops and kind.engine == PYTORCH_ALGORITHM_2:
        for k in candidate.ks:
            if k < n:
                yield TorchForm(kind.engine, k, batches, candidate.renormalize, kind.provider)


def _torch_entry(model: Model, place: Callable[[], Model], form: TorchForm) -> Entry:
    here = Held(place, form)
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
