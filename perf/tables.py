"""Markdown tables of the measured layers and models, and the speed targets beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moexport.bench.results import ONNXRUNTIME, PYTORCH_EAGER, Results, Row
from moexport.common.text import count, markdown
from moexport.common.timing import Latency
from moexport.graphs.choices import Precision

from .layers import (
    ALGORITHM_2,
    BASELINES,
    COMPILED,
    LARGE,
    LOOP,
    LOWERINGS,
    PLAIN,
    SHAPES,
    STACKED,
    Shape,
    chosen,
)
from .models import AUTO, EAGER, INT8
from .mumoe import LAYERS, REFERENCE

AUTO_SLACK = 0.15
"""`auto` may be this much slower than the best lowering of a cell."""

DISTURBED = 0.5
"""Round medians that differ by more than this share say little of a ratio."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape, batch and k: medians in milliseconds, by what was measured.

    The untouched layer is among them, measured in the same rounds. `limit` is the least time that
    the machine needs for k experts, at the rates that it had in those rounds.
    """

    shape: Shape
    batch: int
    k: int
    limit: float
    medians: dict[str, float]
    spreads: dict[str, float]
    precision: Precision = "fp32"

    def speedup(self, baseline: str) -> str:
        """How many times faster `auto` is, with ≈ where a round of either was disturbed."""
        if baseline not in self.medians:
            return "–"
        ratio = self.medians[baseline] / self.auto_ms
        disturbed = max(self.spreads[baseline], self.spreads[self.auto]) > DISTURBED
        return f"{'≈ ' if disturbed else ''}{ratio:.1f}×"

    @property
    def auto_ms(self) -> float:
        """The time of `auto`."""
        return self.medians[self.auto]

    @property
    def over_limit(self) -> float:
        """The time of `auto` over the least time."""
        return self.auto_ms / self.limit

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowerings that were measured."""
        return tuple(name for name in LOWERINGS if name in self.medians)

    @property
    def best(self) -> str:
        """The fastest lowering."""
        return min(self.lowerings, key=self.medians.__getitem__)

    @property
    def auto(self) -> str:
        """The lowering that `auto` chooses."""
        return chosen(self.shape, self.k, self.batch, self.precision)

    @property
    def auto_slack(self) -> float:
        """How much slower `auto` is than the best: 0.1 is 10%."""
        return self.slack_of(self.auto)

    def slack_of(self, name: str) -> float:
        """How much slower a lowering is than the best: 0 within what the rounds can tell apart."""
        slower = self.medians[name] / self.medians[self.best] - 1.0
        return slower if slower > max(self.spreads[name], self.spreads[self.best]) else 0.0


def cells(
    results: Results, shapes: Sequence[Shape] = SHAPES, precision: Precision = "fp32"
) -> Iterator[Cell]:
    """Yields the grid that was measured in a precision: by shape, by batch, k falling.

    Of what was measured twice, the first measurement counts. The untouched layer is FP32's.
    """
    for shape in shapes:
        rows = [
            row
            for row in results.of_model(shape.name)
            if row.latency_ms is not None
            and (row.precision == precision or row.lowering in BASELINES)
        ]
        for batch in sorted({row.batch for row in rows}):
            lowered = [row for row in rows if row.batch == batch and row.lowering in LOWERINGS]
            limits = {row.k: row.limit_ms for row in reversed(lowered) if row.limit_ms is not None}
            for k in sorted(limits, reverse=True):
                found: dict[str, Latency] = {}
                # The untouched layer as measured beside this k, where it was measured again.
                for row in sorted(rows, key=lambda row: row.k != k):
                    untouched = row.lowering in BASELINES and row.k in (k, shape.experts)
                    if row.batch == batch and (untouched or row.k == k) and row.latency_ms:
                        name = ALGORITHM_2 if row.engine == "pytorch-algorithm-2" else row.lowering
                        found.setdefault(str(name), row.latency_ms)
                medians = {name: latency.median for name, latency in found.items()}
                spreads = {name: latency.spread for name, latency in found.items()}
                cell = Cell(shape, batch, k, limits[k], medians, spreads, precision)
                # Of the largest layer one lowering was measured; `auto` may choose another today.
                if cell.auto in medians:
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
                *(cell.shape.name, str(cell.batch), str(cell.k)),
                *(_ms(cell.medians.get(name)) for name in baselines),
                *_lowered(cell),
                *(cell.speedup(name) for name in (STACKED, COMPILED, PLAIN)),
            )
            for cell in cells(results, (*SHAPES, LARGE))
        ),
    )


def integer_table(results: Results) -> str:
    """Returns INT8 beside FP32 as Markdown: medians in ms, the choice of `auto` in bold."""
    floats = _grid(results, (*SHAPES, LARGE))
    rows = []
    for place, cell in _grid(results, (*SHAPES, LARGE), "int8").items():
        single = floats.get(place)
        float_ms = None if single is None else single.auto_ms
        rows.append(
            (
                *(cell.shape.name, str(cell.batch), str(cell.k), _ms(float_ms), *_lowered(cell)),
                _times(float_ms, cell.auto_ms),
                *(cell.speedup(name) for name in (STACKED, LOOP)),
            )
        )
    header = (
        *("layer", "batch", "k", "FP32, `auto`", *(f"`{name}`" for name in LOWERINGS)),
        *("limit", "`auto` over limit", "vs FP32", "vs PyTorch, stacked", "vs loop"),
    )
    return markdown(header, rows)


def _lowered(cell: Cell) -> Iterator[str]:
    """The median of each lowering, that of `auto` in bold; the limit, and `auto` over it."""
    for name in LOWERINGS:
        text = _ms(cell.medians.get(name))
        yield f"**{text}**" if name == cell.auto else text
    yield _ms(cell.limit)
    yield f"{cell.over_limit:.2f}"


def targets_table(results: Results) -> str:
    """Returns the speed targets as Markdown, each with what was measured and what is possible."""
    grid = _grid(results)
    few, many = SHAPES
    rows: list[tuple[str, ...]] = []
    for shape, batch, k, floor in ((few, 1, 2, 14), (few, 100, 2, 9), (many, 1, 16, 8)):
        cell = grid[shape, batch, k]
        rows.append(
            (
                f"{shape.name}, batch {batch}, k = {k}: times PyTorch's dense layer",
                *(f"{floor}×", cell.speedup(STACKED), cell.speedup(LOOP)),
                f"{cell.medians[STACKED] / cell.limit:.1f}× ({cell.limit:.1f} ms)",
            )
        )
    for shape in SHAPES:
        n = shape.experts
        ratio = grid[shape, 1, n // 4].auto_ms / grid[shape, 1, n].auto_ms
        what = f"{shape.name}, batch 1: t(k = n/4) / t(k = n)"
        rows.append((what, "≤ 0.30", f"{ratio:.2f}", "", ""))
    rows += [(*row, "", "") for row in _worst(results, grid, "fp32")]
    most = "most that memory and cores allow, vs stacked"
    return markdown(("target", "asked", "vs stacked", "vs loop", most), rows)


def integer_targets_table(results: Results) -> str:
    """Returns the targets of INT8 as Markdown, with what was measured."""
    floats, integers = _grid(results), _grid(results, SHAPES, "int8")
    few, many = SHAPES
    rows: list[tuple[str, ...]] = []
    for shape, batch, k, floor, untouched in (
        (few, 1, 2, 2.5, "60×"),
        (few, 100, 2, 1.8, "18×"),
        (many, 1, 16, 1.3, "–"),
    ):
        cell, single = integers[shape, batch, k], floats[shape, batch, k]
        rows.append(
            (
                f"{shape.name}, batch {batch}, k = {k}",
                *(f"{floor}×", _times(single.auto_ms, cell.auto_ms)),
                *(_times(single.limit, cell.limit), untouched),
                *(cell.speedup(STACKED), cell.speedup(LOOP)),
                _times(cell.medians[STACKED], cell.limit),
            )
        )
    rows += [(*row, "", "", "", "", "") for row in _worst(results, integers, "int8")]
    header = (
        *("target", "asked, vs FP32", "vs FP32", "most, vs FP32's limit", "asked, vs PyTorch"),
        *("vs stacked", "vs loop", "most, vs stacked"),
    )
    return markdown(header, rows)


Grid = dict[tuple[Shape, int, int], Cell]
"""Cells by their shape, batch and k."""


def _grid(
    results: Results, shapes: Sequence[Shape] = SHAPES, precision: Precision = "fp32"
) -> Grid:
    return {(cell.shape, cell.batch, cell.k): cell for cell in cells(results, shapes, precision)}


LIMITS = {1: 1.5, 100: 2.0}
"""By batch: how many times the limit a layer may take, for k from n to n/8."""


def _worst(results: Results, grid: Grid, precision: Precision) -> Iterator[tuple[str, str, str]]:
    """What is asked of all cells, and the worst: over its limit, by batch, and of `auto`."""
    for batch, bound in LIMITS.items():
        asked = [
            cell
            for cell in cells(results, (*SHAPES, LARGE), precision)
            if cell.batch == batch and cell.k in cell.shape.integer_ks
        ]
        worst = max(asked, key=lambda cell: cell.over_limit)
        yield (
            f"batch {batch}, k = n to n/8: time over limit, worst of {len(asked)} cells",
            f"≤ {bound}",
            f"{worst.over_limit:.2f} ({worst.shape.name}, k = {worst.k})",
        )
    worst = max(grid.values(), key=lambda cell: cell.auto_slack)
    yield (
        f"`auto` over the best lowering, worst of {len(grid)} cells",
        f"≤ {AUTO_SLACK:.0%}",
        f"{worst.auto_slack:.0%} ({worst.shape.name}, batch {worst.batch}, k = {worst.k})",
    )


def mumoe_table(results: Results) -> str:
    """Returns the muMoE layers as Markdown, beside the least time that the machine needs for each.

    That is the weights streamed from memory, or the multiply-adds at the rate of a large matmul,
    whichever takes longer; weights that stay in a cache may take less.
    """
    rows = []
    for layer in LAYERS:
        found = {(row.engine, row.precision): row for row in results.of_model(layer.name)}
        medians = {
            key: row.latency_ms.median for key, row in found.items() if row.latency_ms is not None
        }
        published, einsum = medians[PYTORCH_EAGER, "fp32"], medians[REFERENCE, "fp32"]
        single, integers = (ONNXRUNTIME, "fp32"), (ONNXRUNTIME, "int8")
        macs = sum(layer.spec.macs(layer.tokens, layer.spec.experts).values())
        cells = [layer.name, str(layer.tokens), count(macs), f"{layer.asked:g}×"]
        cells += [_ms(published), _ms(einsum)]
        for key in (single, integers):
            ours = medians[key]
            cells += [_ms(ours), _times(published, ours), _times(einsum, ours)]
            cells += [_times(medians[single], ours)] if key == integers else []
            cells += _limit(ours, found[key].limit_ms)
        rows.append(cells)
    header = (
        *("layer", "tokens", "multiply-adds", "asked", "PyTorch, published", "einsum alone"),
        *("FP32", "vs published", "vs einsum", "limit", "over limit"),
        *("INT8", "vs published", "vs einsum", "vs FP32", "limit", "over limit"),
    )
    return markdown(header, rows)


def model_table(results: Results, batch: int | None = None) -> str:
    """Returns whole models as Markdown: medians in ms for every k, beside their limits.

    Only one batch size where that is given.
    """
    lines = []
    for model in results.models:
        rows = [row for row in results.of_model(model.name) if row.latency_ms is not None]
        found = {(row.batch, str(row.lowering), row.k): row for row in rows}

        def median(*key: object, found: Mapping[Any, Row] = found) -> float | None:
            row = found.get(key)
            return None if row is None or row.latency_ms is None else row.latency_ms.median

        for row in rows:
            if row.lowering != AUTO or batch not in (None, row.batch):
                continue
            ours, integers = median(row.batch, AUTO, row.k), median(row.batch, INT8, row.k)
            whole = [median(row.batch, name, row.experts) for name in (EAGER, COMPILED, PLAIN)]
            integer_row = found.get((row.batch, INT8, row.k))
            lines.append(
                (
                    *(model.name, str(row.batch), str(row.k), *map(_ms, whole)),
                    *(_ms(ours), *_limit(ours, row.limit_ms), *(_times(m, ours) for m in whole)),
                    _ms(integers),
                    *_limit(integers, None if integer_row is None else integer_row.limit_ms),
                    _times(whole[0], integers),
                )
            )
    header = (
        *("model", "batch", "k", "PyTorch eager", "`torch.compile`", "`torch.onnx`"),
        *("exported, `auto`", "limit", "over limit", "vs eager", "vs compile", "vs `torch.onnx`"),
        *("INT8", "limit", "over limit", "vs eager"),
    )
    return markdown(header, lines)


def _limit(ms: float | None, limit: float | None) -> tuple[str, str]:
    """The least time, and a time over it."""
    return _ms(limit), "–" if ms is None or limit is None else f"{ms / limit:.2f}"


def _times(slower: float | None, faster: float | None) -> str:
    return "–" if slower is None or faster is None else f"{slower / faster:.1f}×"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
