"""`Runner` and `Loader`: what every runtime offers to a benchmark.

Loads no runtime: the process that measures a graph's memory must not hold PyTorch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from ...data.feeds import Array
from ...errors import MoexportError
from ...exporter.inputs import Inputs

if TYPE_CHECKING:
    from ...exporter.model import Model
    from ...exporter.tensorrt.options import EngineOptions


class Runner(ABC):
    """A model, graph or engine that is open; k is part of it. Closed by leaving its context.

    Inputs are an array [b, …], or those of a model with several by name. What a runtime cannot tell
    (`device_ms`, `selected`, `computed_in`) is None.
    """

    wraps: ClassVar[bool] = False
    """Whether `bound` leaves out what `infer` does beside calling the runtime."""

    @property
    def computed_in(self) -> str | None:
        """What the runtime says that it computed matrix products in."""
        return None

    @abstractmethod
    def infer(self, x: Inputs, output: int = 0) -> Array:
        """Maps inputs [b, …] to outputs [b, …]: those of the first output, or of a later one."""

    def bound(self, x: Inputs) -> Callable[[], object]:
        """Returns the call that is timed for inputs [b, …].

        Where `wraps`, it is the runtime's own, without the checks and names that `infer` puts
        around it: preparing it here takes what they take in a call of `infer`.
        """
        return partial(self.infer, x)

    def device_ms(self, x: Inputs) -> float | None:
        """Runs inputs [b, …] and returns the milliseconds that the device took, without copies."""
        del x
        return None

    def selected(self, x: Inputs) -> Mapping[str, Array] | None:
        """Returns the chosen experts [b, k], ascending, of each MoE layer by its name.

        Those of each token [t, k] where tokens choose. Layers that keep all their experts may be
        left out: they choose nothing.
        """
        del x
        return None

    def close(self) -> None:  # noqa: B027  most have nothing to give back but their memory
        """Gives back what the runner holds."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


R = TypeVar("R", bound=Runner)


class Loader(ABC):
    """Opens a runner; that may export, compile or load, and may fail.

    One that can be pickled is opened by another process too, which measures its memory.
    """

    @abstractmethod
    def __call__(self) -> Runner:
        """Opens the runner, able to show what its layers choose."""

    def deployed(self) -> Runner:
        """Opens the runner as it is deployed: with nothing to observe."""
        return self()

    @property
    def profiles(self) -> bool:
        """Whether `profile` can tell where the time goes."""
        return False

    def profile(self, batches: Sequence[Inputs], calls: int) -> list[dict[str, Any]]:
        """Returns the runtime's own events (Chrome trace) of `calls` calls, batches in turn."""
        del batches, calls
        return []

    @property
    def file(self) -> Path | None:
        """The graph's file, where it is one."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFile:
    """A graph to open; a plain value, so that another process can open it too.

    `selected` names the values that hold the chosen experts [b, k] of the layers that choose, and
    `experts` n of every layer that could. `k` is given where it is a graph input. With `options` an
    engine is compiled from it, in the bundle that holds it, unless that is there.
    """

    path: Path
    selected: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    k: int | None = None
    threads: int | None = None
    options: EngineOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """A model to run in PyTorch, as an engine's loader gets it.

    `k` is what Algorithm 2 keeps in each layer, and `k_by_layer` what routers choose. What is
    compiled is compiled for the sizes of `batches`.
    """

    model: Model
    provider: str
    k: int
    k_by_layer: Mapping[str, int]
    batches: tuple[int, ...]
    renormalize: bool


@dataclass(frozen=True)
class GraphLoader(Loader, Generic[R]):
    """Opens a graph file."""

    graph: GraphFile

    def __call__(self) -> R:
        selected, experts = self.graph.selected, self.graph.experts
        sets = {layer: value for layer, value in selected.items() if layer in experts}
        return self.opened(sets, experts)

    def deployed(self) -> R:
        return self.opened({}, {})

    @abstractmethod
    def opened(self, observed: Mapping[str, str], experts: Mapping[str, int]) -> R:
        """Opens the graph with the values that are `observed`, by layer, as further outputs."""

    @property
    def file(self) -> Path:
        return self.graph.path


@dataclass(frozen=True)
class Refused(Loader):
    """What could not be exported: opening it tells why."""

    reason: MoexportError

    def __call__(self) -> Runner:
        raise self.reason


def first_of(x: Inputs) -> Array:
    """Returns the array of a model's first input: of most models the only one."""
    return x if isinstance(x, np.ndarray) else next(iter(x.values()))


def chosen_experts(
    selected: Mapping[str, Array], experts: Mapping[str, int], rows: int
) -> dict[str, Array]:
    """Returns the experts [rows, k] of each layer, ascending: all n of a layer that chose none.

    Those of tokens are [b, m, k] where a graph exposes them: each token is a row.
    """
    every = {layer: np.tile(np.arange(n), (rows, 1)) for layer, n in experts.items()}
    chosen = ((layer, selected[layer]) for layer in experts if layer in selected)
    flat = {layer: array.reshape(-1, array.shape[-1]) for layer, array in chosen}
    return every | {layer: np.sort(array, axis=1) for layer, array in flat.items()}


def in_batches(
    run: Callable[[Array], Array], x: Array, *, most: int, takes: Callable[[int], bool]
) -> Array:
    """Maps inputs [b, …] to outputs [b, …] where only some batch sizes can run (`fitting`)."""
    parts = [run(part)[:rows] for part, rows in fitting(x, most=most, takes=takes)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def fitting(x: Array, *, most: int, takes: Callable[[int], bool]) -> Iterator[tuple[Array, int]]:
    """Yields inputs [b, …] in batches of sizes that can run, and how many rows of each count.

    What is more than `most` runs in several batches; one of a size that nothing `takes` is filled
    up to `most` with its last input, whose further outputs are to be dropped.
    """
    for start in range(0, len(x), most):
        part = x[start : start + most]
        full = part
        if not takes(len(part)):
            full = np.ascontiguousarray(part[np.arange(most).clip(max=len(part) - 1)])
        yield full, len(part)
