"""Markdown tables of the measured layers, with the speed targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moexport.bench.results import Results
from moexport.common.latency import Latency
from moexport.common.text import markdown
from moexport.graphs.targets import Precision

from ..measure import ms, times
from .soft_moe import (
    ALGORITHM_2,
    BASELINES,
    COMPILED,
    LARGE,
    LOOP,
    LOWERINGS,
    PLAIN,
    SHAPES,
    STACKED,
    Layer,
)

AUTO_SLACK = 0.15
"""`auto` may be this much slower than the best lowering of a cell."""

DISTURBED = 0.5
"""If the rounds' medians differ by more than this share, a ratio is unreliable."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The measurements of one layer, batch and k, by lowering or form of the untouched layer.

    All were measured in the same rounds. `limit` is the minimum time in milliseconds that the
    machine needs for k experts, at the rates measured in those rounds.
    """

    layer: Layer
    batch: int
    k: int
    limit: float
    latencies: Mapping[str, Latency]
    precision: Precision = "fp32"

    def median(self, name: str) -> float | None:
        """Returns the median milliseconds of a lowering or form, or None."""
        return None if name not in self.latencies else self.latencies[name].median

    def speedup(self, baseline: str) -> str:
        """Returns how many times as fast `auto` is, with ≈ if rounds of either were disturbed."""
        if baseline not in self.latencies:
            return "–"
        both = self.latencies[baseline], self.latencies[self.auto]
        disturbed = max(latency.spread for latency in both) > DISTURBED
        return f"{'≈ ' if disturbed else ''}{times(both[0].median, both[1].median)}"

    @property
    def auto_ms(self) -> float:
        """The time of `auto`."""
        return self.latencies[self.auto].median

    @property
    def over_limit(self) -> float:
        """The time of `auto` divided by the limit."""
        return self.auto_ms / self.limit

    @property
    def lowerings(self) -> dict[str, float]:
        """The milliseconds of the lowerings that were measured."""
        return {name: self.latencies[name].median for name in LOWERINGS if name in self.latencies}

    @property
    def auto(self) -> str:
        """The lowering that `auto` chooses."""
        return self.layer.chosen(self.k, self.batch, self.precision)

    @property
    def auto_slack(self) -> float:
        """How much slower `auto` is than the best lowering: 0.1 is 10%."""
        return self.slack_of(self.auto)

    def slack_of(self, name: str) -> float:
        """Returns how much slower a lowering is than the best; 0 within the rounds' spread."""
        latency = self.latencies[name]
        best = self.latencies[min(self.lowerings, key=self.lowerings.__getitem__)]
        slower = latency.median / best.median - 1.0
        return slower if slower > max(latency.spread, best.spread) else 0.0


def cells(
    results: Results, layers: Sequence[Layer] = SHAPES, precision: Precision = "fp32"
) -> Iterator[Cell]:
    """Yields the grid that was measured in a precision: by layer, batch and descending k.

    If a cell was measured twice, the first measurement counts. The untouched layer is in FP32.
    """
    for layer in layers:
        rows = [
            row
            for row in results.of_model(layer.name)
            if row.latency_ms is not None
            and (row.precision == precision or row.lowering in BASELINES)
        ]
        for batch in sorted({row.batch for row in rows}):
            of_batch = [row for row in rows if row.batch == batch]
            limits = {
                row.k: row.limit_ms
                for row in reversed(of_batch)
                if row.lowering in LOWERINGS and row.limit_ms is not None
            }
            for k in sorted(limits, reverse=True):
                found: dict[str, Latency] = {}
                # The untouched layer as measured with this k, if it was measured again.
                for row in sorted(of_batch, key=lambda row: row.k != k):
                    untouched = row.lowering in BASELINES and row.k == layer.experts
                    if (untouched or row.k == k) and row.latency_ms is not None:
                        found.setdefault(str(row.lowering), row.latency_ms)
                cell = Cell(layer, batch, k, limits[k], found, precision)
                # One lowering of the largest layer was measured; `auto` may now choose another.
                if cell.auto in found:
                    yield cell


def layer_table(results: Results) -> str:
    """Returns the grid as Markdown: medians in ms, the choice of `auto` in bold."""
    baselines = {
        STACKED: "PyTorch, stacked",
        LOOP: "loop",
        COMPILED: "`torch.compile`",
        PLAIN: "`torch.onnx`",
        ALGORITHM_2: "Algorithm 2",
    }
    return markdown(
        (
            *("layer", "batch", "k", *baselines.values(), *(f"`{name}`" for name in LOWERINGS)),
            *("limit", "`auto` over limit", "vs stacked", "vs compile", "vs `torch.onnx`"),
        ),
        (
            (
                *(cell.layer.name, str(cell.batch), str(cell.k)),
                *(ms(cell.median(name)) for name in baselines),
                *_lowered(cell),
                *(cell.speedup(name) for name in (STACKED, COMPILED, PLAIN)),
            )
            for cell in cells(results, (*SHAPES, LARGE))
        ),
    )


def integer_table(results: Results) -> str:
    """Returns INT8 next to FP32 as Markdown: medians in ms, the choice of `auto` in bold."""
    floats = _grid(results, (*SHAPES, LARGE))
    rows = []
    for place, cell in _grid(results, (*SHAPES, LARGE), "int8").items():
        single = floats.get(place)
        float_ms = None if single is None else single.auto_ms
        rows.append(
            (
                *(cell.layer.name, str(cell.batch), str(cell.k), ms(float_ms), *_lowered(cell)),
                times(float_ms, cell.auto_ms),
                *(cell.speedup(name) for name in (STACKED, LOOP)),
            )
        )
    header = (
        *("layer", "batch", "k", "FP32, `auto`", *(f"`{name}`" for name in LOWERINGS)),
        *("limit", "`auto` over limit", "vs FP32", "vs PyTorch, stacked", "vs loop"),
    )
    return markdown(header, rows)


def _lowered(cell: Cell) -> Iterator[str]:
    """Yields the median of each lowering, with `auto` in bold, the limit, and `auto` over it."""
    for name in LOWERINGS:
        text = ms(cell.median(name))
        yield f"**{text}**" if name == cell.auto else text
    yield ms(cell.limit)
    yield f"{cell.over_limit:.2f}"


def targets_table(results: Results) -> str:
    """Returns the speed targets as Markdown, with the measured and the possible speed-ups."""
    grid = _grid(results)
    few, many = SHAPES
    rows: list[tuple[str, ...]] = []
    for layer, batch, k, floor in ((few, 1, 2, 14), (few, 100, 2, 9), (many, 1, 16, 8)):
        cell = grid[layer, batch, k]
        rows.append(
            (
                f"{layer.name}, batch {batch}, k = {k}: times PyTorch's dense layer",
                *(f"{floor}×", cell.speedup(STACKED), cell.speedup(LOOP)),
                f"{cell.latencies[STACKED].median / cell.limit:.1f}× ({cell.limit:.1f} ms)",
            )
        )
    for layer in SHAPES:
        n = layer.experts
        ratio = grid[layer, 1, n // 4].auto_ms / grid[layer, 1, n].auto_ms
        target = f"{layer.name}, batch 1: t(k = n/4) / t(k = n)"
        rows.append((target, "≤ 0.30", f"{ratio:.2f}", "", ""))
    rows += [(*row, "", "") for row in _worst(results, grid, "fp32")]
    possible = "the most that memory and cores allow, vs stacked"
    return markdown(("target", "required", "vs stacked", "vs loop", possible), rows)


def integer_targets_table(results: Results) -> str:
    """Returns the speed targets of INT8 as Markdown, with the measured speed-ups."""
    floats, integers = _grid(results), _grid(results, SHAPES, "int8")
    few, many = SHAPES
    rows: list[tuple[str, ...]] = []
    for layer, batch, k, floor, untouched in (
        (few, 1, 2, 2.5, "60×"),
        (few, 100, 2, 1.8, "18×"),
        (many, 1, 16, 1.3, "–"),
    ):
        cell, single = integers[layer, batch, k], floats[layer, batch, k]
        rows.append(
            (
                f"{layer.name}, batch {batch}, k = {k}",
                *(f"{floor}×", times(single.auto_ms, cell.auto_ms)),
                *(times(single.limit, cell.limit), untouched),
                *(cell.speedup(STACKED), cell.speedup(LOOP)),
                times(cell.latencies[STACKED].median, cell.limit),
            )
        )
    rows += [(*row, "", "", "", "", "") for row in _worst(results, integers, "int8")]
    header = (
        *("target", "required, vs FP32", "vs FP32", "possible, vs FP32's limit"),
        *("required, vs PyTorch", "vs stacked", "vs loop", "possible, vs stacked"),
    )
    return markdown(header, rows)


Grid = dict[tuple[Layer, int, int], Cell]
"""Cells by their layer, batch and k."""


def _grid(
    results: Results, shapes: Sequence[Layer] = SHAPES, precision: Precision = "fp32"
) -> Grid:
    return {(cell.layer, cell.batch, cell.k): cell for cell in cells(results, shapes, precision)}


LIMITS = {1: 1.5, 100: 2.0}
"""By batch size, how many times the limit a layer may take, for k from n to n/8."""


def _worst(results: Results, grid: Grid, precision: Precision) -> Iterator[tuple[str, str, str]]:
    """Yields the requirements for all cells with the worst cell: by batch, and for `auto`."""
    for batch, bound in LIMITS.items():
        required = [
            cell
            for cell in cells(results, (*SHAPES, LARGE), precision)
            if cell.batch == batch and cell.k in cell.layer.integer_ks
        ]
        worst = max(required, key=lambda cell: cell.over_limit)
        yield (
            f"batch {batch}, k = n to n/8: time over limit, worst of {len(required)} cells",
            f"≤ {bound}",
            f"{worst.over_limit:.2f} ({worst.layer.name}, k = {worst.k})",
        )
    worst = max(grid.values(), key=lambda cell: cell.auto_slack)
    yield (
        f"`auto` over the best lowering, worst of {len(grid)} cells",
        f"≤ {AUTO_SLACK:.0%}",
        f"{worst.auto_slack:.0%} ({worst.layer.name}, batch {worst.batch}, k = {worst.k})",
    )
