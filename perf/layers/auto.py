"""Measures how well `auto` chooses, with every possible lowering of Soft MoE layers of many sizes.

The cost model is fitted to half of the layers (`python -m perf fit`); the others only judge it. The
results are saved after every layer, and `python -m perf auto --minutes=12` continues an interrupted
run. Once all layers are measured, the remaining time goes to those that other work disturbed most;
the smallest times count.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from moexport.bench.request import BenchRequest
from moexport.bench.runners.exported import exported
from moexport.common import timing
from moexport.common.console import Progress
from moexport.common.text import markdown
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import SoftMoEPlan
from moexport.graphs.lowerings.choice import batch_spans, choose, exact_lowerings
from moexport.graphs.targets import Precision

from ..measure import keep, kept, measured_on, threads
from .soft_moe import Layer

LOWERINGS = lowerings_of("soft-moe")

BATCHES = (1, 8, 32)

PROTOCOL = timing.Protocol(warmup=2, round_s=0.01)

COPY_LIMIT_BYTES = 256 << 20
"""`gather` is not measured if one batch would copy more weights than this."""

CALIBRATION_INPUTS = 8

MINUTES = 12.0

CpuTarget = Literal["onnx", "ort-cpu"]

FORMS: tuple[tuple[CpuTarget, Precision], ...] = (
    ("ort-cpu", "fp32"),
    ("onnx", "fp32"),
    ("ort-cpu", "int8"),
    ("onnx", "int8"),
)


FITTED = (
    Layer(32, 64, 128, 1, 16, "relu"),
    Layer(48, 16, 96, 1, 16, "gelu"),
    Layer(64, 32, 128, 2, 49, "gelu-tanh"),
    Layer(64, 8, 256, 4, 64, "relu"),
    Layer(128, 128, 128, 1, 64, "relu"),
    Layer(192, 4, 768, 2, 197, "gelu"),
    Layer(192, 32, 384, 1, 196, "gelu-tanh"),
    Layer(384, 16, 1536, 1, 197, "gelu"),
    Layer(384, 64, 192, 2, 100, "relu"),
    Layer(768, 8, 1536, 4, 197, "gelu"),
    Layer(768, 64, 384, 1, 196, "relu"),
)
"""Layers to which the constants may be fitted."""

HELD_OUT = (
    Layer(196, 16, 49, 1, 4, "relu"),  # the demo's own
    Layer(196, 64, 12, 1, 4, "relu"),
    Layer(32, 16, 64, 1, 16, "relu"),
    Layer(32, 128, 32, 1, 16, "gelu"),
    Layer(48, 32, 192, 2, 36, "relu"),
    Layer(64, 64, 64, 1, 16, "gelu-tanh"),
    Layer(96, 4, 384, 4, 64, "gelu"),
    Layer(128, 16, 512, 1, 49, "gelu-tanh"),
    Layer(192, 64, 192, 1, 197, "gelu"),
    Layer(256, 8, 1024, 2, 100, "relu"),
    Layer(384, 32, 384, 4, 197, "gelu"),
    Layer(512, 128, 128, 1, 64, "relu"),
    Layer(768, 16, 3072, 1, 197, "gelu"),
)
"""Layers that judge the choice."""


def ks_of(layer: Layer) -> tuple[int, ...]:
    """Returns the values of k that are measured."""
    n = layer.experts
    return tuple(sorted({n, max(1, n // 4), max(1, n // 16)}, reverse=True))


def named(layer: Layer) -> str:
    """Returns a layer's name in tables."""
    return (
        f"d={layer.dim}, n={layer.experts}, h={layer.hidden}, p={layer.slots}, "
        f"m={layer.tokens}, {layer.activation}"
    )


SAME_GRAPH = ("dense", "gather")
"""These are the same graph if every expert is kept, because nothing is gathered."""

DISTURBED = 1.3
"""If the median exceeds the least time by this factor, other work disturbed the measurement."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer, k, batch and form: the milliseconds of each possible lowering.

    `ms` are the shortest calls, which other work on the machine disturbs least; `medians` are the
    medians of all calls.
    """

    layer: Layer
    k: int
    batch: int
    target: CpuTarget
    precision: Precision
    ms: dict[str, float]
    medians: dict[str, float]

    @property
    def plan(self) -> SoftMoEPlan:
        """The layer of the cell."""
        return self.layer.plan(self.k, self.batch, self.precision)

    @property
    def best(self) -> float:
        """The time of the fastest lowering."""
        return min(self.ms.values())

    def ratio(self, name: str) -> float:
        """Returns a lowering's time over the fastest's; infinite if it was too slow to measure."""
        names = SAME_GRAPH if self.same_graph is not None and name in SAME_GRAPH else (name,)
        return min(self.ms.get(each, float("inf")) for each in names) / self.best

    @property
    def same_graph(self) -> float | None:
        """The ratio of two times of the same graph; None if weights are gathered."""
        if self.k < self.layer.experts or not all(name in self.ms for name in SAME_GRAPH):
            return None
        times = [self.ms[name] for name in SAME_GRAPH]
        return max(times) / min(times)

    def disturbance(self, name: str | None = None) -> float:
        """Returns the median over the least time of a lowering, by default the fastest one."""
        name = name or min(self.ms, key=self.ms.__getitem__)
        return self.medians[name] / self.ms[name] if name in self.ms else 1.0

    def undisturbed(self, name: str) -> bool:
        """Returns whether neither a lowering's time nor the fastest's was disturbed."""
        return max(self.disturbance(), self.disturbance(name), self.same_graph or 1.0) <= DISTURBED

    @property
    def key(self) -> tuple[object, ...]:
        """The cell's position in the grid."""
        return self.layer, self.target, self.precision, self.k, self.batch

    def merged(self, other: Cell) -> Cell:
        """Returns the smaller times of two measurements of this cell."""
        return replace(
            self,
            ms={name: min(ms, other.ms.get(name, ms)) for name, ms in self.ms.items()},
            medians={
                name: min(ms, other.medians.get(name, ms)) for name, ms in self.medians.items()
            },
        )


def chosen(cell: Cell, batches: tuple[int, ...] = ()) -> str:
    """Returns the choice of `auto` for a cell's batch, or for a range of `batches`."""
    plan = replace(cell.plan, batch=batches[0]) if batches else cell.plan
    return choose(plan, cell.target, batches).lowering.name


SPAN = (BATCHES[0], BATCHES[-1])


def chosen_by_batch(cell: Cell) -> str:
    """Returns the choice of `auto` for a cell's batch among its graphs for the whole range."""
    spans = batch_spans([replace(cell.plan, batch=SPAN[0])], cell.target, *SPAN)
    return chosen(cell, next(span for span in spans if span[0] <= cell.batch <= span[1]))


def least_ratios(cells: Sequence[Cell]) -> list[float]:
    """Returns the best single graph's ratio at its worst batch, for each layer, form and k."""
    batches: dict[object, list[Cell]] = {}
    for cell in cells:
        batches.setdefault(cell.key[:-1], []).append(cell)
    return [
        min(max(each.ratio(name) for each in same) for name in same[0].ms)
        for same in batches.values()
        if same[0].batch == BATCHES[0]
    ]


def read_cells(file: Path, layers: Sequence[Layer] = (*FITTED, *HELD_OUT)) -> list[Cell]:
    """Returns the measurements of some layers, sorted by batch."""
    if not file.exists():
        return []
    cells = [Cell(**{**each, "layer": Layer(**each["layer"])}) for each in kept(file)["cells"]]
    return sorted((cell for cell in cells if cell.layer in layers), key=lambda cell: cell.batch)


def measure(file: Path, progress: Progress, minutes: float = MINUTES) -> None:
    """Measures missing cells in random order, then disturbed ones, the worst first."""
    cells = {cell.key: cell for cell in read_cells(file)}
    forms = [(layer, *form) for layer in (*FITTED, *HELD_OUT) for form in FORMS]
    random.Random(0).shuffle(forms)
    visits = dict.fromkeys(forms, 0)
    end = time.monotonic() + 60 * minutes
    count = threads()
    while time.monotonic() < end:
        form = _next(forms, visits, cells.values())
        if form is None:
            return
        layer, target, precision = form
        visits[form] += 1
        progress.step(f"{named(layer)}: {target}, {precision}")
        for cell in measured(layer, target, precision, count):
            before = cells.get(cell.key)
            cells[cell.key] = cell if before is None else before.merged(cell)
        body: list[dict[str, Any]] = [asdict(cell) for cell in cells.values()]
        load: float | None = None
        if sys.platform != "win32":
            load = os.getloadavg()[0]
        keep(file, "auto", batches=BATCHES, threads=count, load=load, cells=body)
    progress.step("no time is left")


Form = tuple[Layer, CpuTarget, Precision]


def _next(forms: Sequence[Form], visits: Mapping[Form, int], cells: Iterable[Cell]) -> Form | None:
    """Returns the next form: a missing one, otherwise the most disturbed of the least visited.

    Returns None if no measurement was disturbed.
    """
    worst: dict[Form, float] = {}
    for cell in cells:
        form = cell.layer, cell.target, cell.precision
        worst[form] = max(worst.get(form, 1.0), cell.disturbance(), cell.same_graph or 1.0)
    missing = [form for form in forms if form not in worst]
    if missing:
        return missing[0]
    disturbed = [form for form in forms if worst[form] > DISTURBED]
    return min(disturbed, key=lambda form: (visits[form], -worst[form]), default=None)


def measured(layer: Layer, target: CpuTarget, precision: Precision, count: int) -> Iterator[Cell]:
    """Yields a layer's cells in one form; the lowerings of a batch are interleaved."""
    ks = ks_of(layer)
    names = [each.name for each in exact_lowerings(layer.plan(1, 1, precision), target)]
    asked = BenchRequest(
        k=ks,
        lowering=names,
        engine="onnxruntime",
        precision=precision,
        threads=count,
        target=target,
    )
    inputs = layer.inputs(CALIBRATION_INPUTS).inputs if precision == "int8" else None
    with exported(layer.models()[0], asked, inputs=inputs) as candidate:
        graphs = {(str(each.lowering), each.k): each.loader().infer for each in candidate.graphs}
        for batch in BATCHES:
            x = layer.inputs(batch).inputs
            calls = {
                f"{name} {k}": partial(_called, infer, x)
                for (name, k), infer in graphs.items()
                if LOWERINGS[name].copied_bytes(layer.plan(k, batch)) <= COPY_LIMIT_BYTES
            }
            found = timing.measure(calls, PROTOCOL).latencies
            for k in ks:
                of_k = {name: found[key] for name in names if (key := f"{name} {k}") in found}
                ms = {name: latency.min for name, latency in of_k.items()}
                medians = {name: latency.median for name, latency in of_k.items()}
                yield Cell(layer, k, batch, target, precision, ms, medians)


def _called(infer: Callable[[np.ndarray], object], x: np.ndarray, index: int) -> object:
    return infer(x)


Choice = Callable[[Cell], str]
"""A function that chooses a lowering for a cell."""

CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        "a batch": chosen,
        "1:1:32, graphs by batch": chosen_by_batch,
        "1:1:32, one graph": partial(chosen, batches=SPAN),
    }
)
"""The choices of `auto` for a cell's own batch, and for a range: with the graphs that it writes,
and with a single graph."""


def table(file: Path) -> str:
    """Returns the ratios of the choice to the best as Markdown: of all and of undisturbed cells."""
    rows = []
    for title, layers in (("fitted to", FITTED), ("held out", HELD_OUT)):
        for precision in ("fp32", "int8"):
            cells = [cell for cell in read_cells(file, layers) if cell.precision == precision]
            for asked, choice in CHOICES.items() if cells else ():
                found = [(cell.ratio(choice(cell)), cell) for cell in cells]
                quiet = [(ratio, cell) for ratio, cell in found if cell.undisturbed(choice(cell))]
                rows.append((title, precision, asked, *_summary(found), *_summary(quiet)))
    counts = ("cells", "median", "95%", "worst")
    header = (
        *("layers", "precision", "`--batch`", *counts, "where"),
        *("undisturbed", *counts[1:], "where"),
    )
    every = read_cells(file)
    least = least_ratios(every)
    one_graph = f"{np.median(least):.2f} times the best, {max(least):.2f} at the worst"
    same = [cell.same_graph for cell in every if cell.same_graph is not None]
    apart = f"{np.median(same):.2f} times in the median and {np.quantile(same, 0.95):.2f} at 95%"
    body = kept(file)
    return (
        f"{measured_on(body)}; load average {body['load']:.1f}. Two measurements of the same graph "
        f"differ by {apart}: smaller ratios mean nothing. A cell is undisturbed if the medians of "
        f"the choice and of the best are at most {DISTURBED:g} times their least times.\n\n"
        f"{markdown(header, rows)}\n\n"
        f"The best single graph for all of these batches would take {one_graph}."
    )


def _summary(ratios: Sequence[tuple[float, Cell]]) -> tuple[str, ...]:
    """Returns the number of ratios, their median, 95% quantile and maximum, and the worst cell."""
    if not ratios:
        return ("0", *4 * ("–",))
    found = [ratio for ratio, _ in ratios]
    worst, where = max(ratios, key=lambda each: each[0])
    middle, high = np.median(found), np.quantile(found, 0.95)
    cell = f"{named(where.layer)}, {where.target}, k = {where.k}, batch {where.batch}"
    return str(len(found)), f"{middle:.2f}", f"{high:.2f}", f"{worst:.2f}", cell
