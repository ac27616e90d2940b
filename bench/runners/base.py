"""`Runner` and `Loader`: the interface of every runtime in a benchmark.

This module loads no runtime: the process that measures a graph's memory must not load PyTorch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from ...data.batches import Array
from ...errors import MoexportError
from ...exporter.inputs import Inputs

if TYPE_CHECKING:
    from ...exporter.model import Model
    from ...exporter.tensorrt.options import EngineOptions


class Runner(ABC):
    """An open model, graph or engine with a given k; leaving its context closes it.

    Inputs are an array [b, …], or arrays by name for a model with several. Values that a runtime
    does not report (`device_ms`, `selected`, `computed_in`, `no_cuda_graph`) are None.
    """

    wraps: ClassVar[bool] = False
    """Whether `bound` excludes the work of `infer` around the runtime's call."""

    @property
    def computed_in(self) -> str | None:
        """The type in which the runtime reports that it computed matrix products."""
        return None

    @property
    def no_cuda_graph(self) -> str | None:
        """Why calls on a GPU are not replayed as CUDA graphs, for a runtime that supports them."""
        return None

    @abstractmethod
    def infer(self, x: Inputs, output: int = 0) -> Array:
        """Maps inputs [b, …] to values [b, …] of the model's output with this index."""

    def bound(self, x: Inputs) -> Callable[[], object]:
        """Returns the call that is timed for inputs [b, …].

        With `wraps`, it is the runtime's own call. The work that `infer` adds to each call is done
        once, here, which takes as long as in `infer`.
        """
        return partial(self.infer, x)

    def device_ms(self, x: Inputs) -> float | None:
        """Runs inputs [b, …] and returns the time on the device in ms, without copies."""
        return None

    def selected(self, x: Inputs) -> Mapping[str, Array] | None:
        """Returns the chosen experts [b, k], ascending, by the name of the MoE layer.

        If tokens choose, the experts are those of each token [t, k]. Layers that keep all their
        experts may be missing.
        """
        return None

    def close(self) -> None:  # noqa: B027  most have nothing to release but memory
        """Releases the runner's resources."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


R = TypeVar("R", bound=Runner)


class Loader(ABC):
    """Opens a runner; this may export, compile or load, and may fail.

    If it can be pickled, another process also opens it, to measure its memory.
    """

    @abstractmethod
    def __call__(self) -> Runner:
        """Opens the runner with additional outputs for the experts that layers choose."""

    def deployed(self) -> Runner:
        """Opens the runner as in deployment, without the additional outputs."""
        return self()

    @property
    def profiles(self) -> bool:
        """Returns whether `profile` can measure the time of parts."""
        return False

    def profile(self, batches: Sequence[Inputs], calls: int) -> list[dict[str, Any]]:
        """Returns the runtime's Chrome trace events of `calls` calls with the batches in turn."""
        return []

    @property
    def file(self) -> Path | None:
        """The graph's file, if the loader opens one."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFile:
    """A graph to open, as plain data, so that another process can also open it.

    `selected` names the values with the chosen experts [b, k] of the layers that choose, and
    `experts` is n by layer. `k` is given if it is a graph input. With `options`, an engine is
    compiled from the graph and added to its bundle, unless the bundle has one.
    """

    path: Path
    selected: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    k: int | None = None
    threads: int | None = None
    options: EngineOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """A model to run in PyTorch, for an engine's loader.

    Algorithm 2 keeps `k` experts in each layer; routers choose `k_by_layer`. `torch.compile` uses
    the sizes in `batches`. The whole model computes in `precision`, FP32 or FP16.
    """

    model: Model
    provider: str
    k: int
    k_by_layer: Mapping[str, int]
    batches: tuple[int, ...]
    renormalize: bool
    precision: str = "fp32"


@dataclass(frozen=True)
class GraphLoader(Loader, Generic[R]):
    """Opens a graph file."""

    graph: GraphFile

    def __call__(self) -> R:
        selected, experts = self.graph.selected, self.graph.experts
        sets = {layer: value for layer, value in selected.items() if layer in experts}
        return self.open_graph(sets, experts)

    def deployed(self) -> R:
        return self.open_graph({}, {})

    @abstractmethod
    def open_graph(self, observed: Mapping[str, str], experts: Mapping[str, int]) -> R:
        """Opens the graph with the `observed` values, by layer, as additional outputs."""

    @property
    def file(self) -> Path:
        return self.graph.path


@dataclass(frozen=True)
class Refused(Loader):
    """A graph that could not be exported: opening it raises the reason."""

    reason: MoexportError

    def __call__(self) -> Runner:
        raise self.reason


def first_of(x: Inputs) -> Array:
    """Returns the array of a model's first input, often its only one."""
    return x if isinstance(x, np.ndarray) else next(iter(x.values()))


def chosen_experts(
    selected: Mapping[str, Array], experts: Mapping[str, int], rows: int
) -> dict[str, Array]:
    """Returns the experts [rows, k] of each layer, ascending: all n if a layer does not choose.

    If a graph exposes choices of tokens [b, m, k], each token is a row.
    """
    every = {layer: np.tile(np.arange(n), (rows, 1)) for layer, n in experts.items()}
    chosen = ((layer, selected[layer]) for layer in experts if layer in selected)
    flat = {layer: array.reshape(-1, array.shape[-1]) for layer, array in chosen}
    return every | {layer: np.sort(array, axis=1) for layer, array in flat.items()}


def in_batches(
    run: Callable[[Array], Array], x: Array, *, limit: int, accepts: Callable[[int], bool]
) -> Array:
    """Maps inputs [b, …] to outputs [b, …] if only some batch sizes can run (`fitting`)."""
    parts = [run(part)[:rows] for part, rows in fitting(x, limit=limit, accepts=accepts)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def fitting(x: Array, *, limit: int, accepts: Callable[[int], bool]) -> Iterator[tuple[Array, int]]:
    """Yields inputs [b, …] in batches of sizes that can run, and the number of valid rows in each.

    More than `limit` inputs run in several batches; a batch of a size that cannot run is padded to
    `limit` with its last input.
    """
    for start in range(0, len(x), limit):
        part = x[start : start + limit]
        full = part
        if not accepts(len(part)):
            full = np.ascontiguousarray(part[np.arange(limit).clip(max=len(part) - 1)])
        yield full, len(part)
