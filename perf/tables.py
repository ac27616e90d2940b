"""Markdown tables from a results file of `perf.layers`, and the targets beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moexport.bench.results import ONNXRUNTIME, PYTORCH_EAGER, Results
from moexport.common.text import count, size
from moexport.common.timing import Latency
from moexport.graphs.precision.types import Precision

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
from .mumoe import REFERENCE, SUBJECTS
from .scale import Scale

EXPORT_STEPS = ("loading", "tracing", "writing", "checking", "hashing")
"""The steps of a verified export, by the first word of what it says."""

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
        ratio = self.medians[baseline] / self.medians[self.auto]
        disturbed = max(self.spreads[baseline], self.spreads[self.auto]) > DISTURBED
        return f"{'≈ ' if disturbed else ''}{ratio:.1f}×"

    @property
    def over_limit(self) -> float:
        """The time of `auto` over the least time."""
        return self.medians[self.auto] / self.limit

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
    lines = [
        f"| layer | batch | k | {' | '.join(baselines.values())} | "
        + " | ".join(f"`{name}`" for name in LOWERINGS)
        + " | limit | `auto` over limit | vs stacked | vs compile | vs `torch.onnx` |",
        "|" + "---|" * (8 + len(baselines) + len(LOWERINGS)),
    ]
    for cell in cells(results, (*SHAPES, LARGE)):
        columns = [_ms(cell.medians.get(name)) for name in baselines]
        for name in LOWERINGS:
            text = _ms(cell.medians.get(name))
            columns.append(f"**{text}**" if name == cell.auto else text)
        columns += [_ms(cell.limit), f"{cell.over_limit:.2f}"]
        columns += [cell.speedup(name) for name in (STACKED, COMPILED, PLAIN)]
        lines.append(f"| {cell.shape.name} | {cell.batch} | {cell.k} | {' | '.join(columns)} |")
    return "\n".join(lines)


def integer_table(results: Results) -> str:
    """Returns INT8 beside FP32 as Markdown: medians in ms, the choice of `auto` in bold."""
    floats = {(c.shape, c.batch, c.k): c for c in cells(results, (*SHAPES, LARGE))}
    lines = [
        "| layer | batch | k | FP32, `auto` | "
        + " | ".join(f"`{name}`" for name in LOWERINGS)
        + " | limit | `auto` over limit | vs FP32 | vs PyTorch, stacked | vs loop |",
        "|" + "---|" * (9 + len(LOWERINGS)),
    ]
    for cell in cells(results, (*SHAPES, LARGE), "int8"):
        single = floats.get((cell.shape, cell.batch, cell.k))
        float_ms = None if single is None else single.medians[single.auto]
        columns = [_ms(float_ms)]
        for name in LOWERINGS:
            text = _ms(cell.medians.get(name))
            columns.append(f"**{text}**" if name == cell.auto else text)
        columns += [
            _ms(cell.limit),
            f"{cell.over_limit:.2f}",
            _times(float_ms, cell.medians[cell.auto]),
            cell.speedup(STACKED),
            cell.speedup(LOOP),
        ]
        lines.append(f"| {cell.shape.name} | {cell.batch} | {cell.k} | {' | '.join(columns)} |")
    return "\n".join(lines)


def integer_targets_table(results: Results) -> str:
    """Returns the targets of INT8 as Markdown, with what was measured."""
    floats = {(c.shape, c.batch, c.k): c for c in cells(results)}
    integers = {(c.shape, c.batch, c.k): c for c in cells(results, SHAPES, "int8")}
    few, many = SHAPES
    lines = [
        "| target | asked, vs FP32 | vs FP32 | most, vs FP32's limit | asked, vs PyTorch | "
        "vs stacked | vs loop | most, vs stacked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, batch, k, floor, untouched in (
        (few, 1, 2, 2.5, "60×"),
        (few, 100, 2, 1.8, "18×"),
        (many, 1, 16, 1.3, "–"),
    ):
        cell, single = integers[shape, batch, k], floats[shape, batch, k]
        ratio = single.medians[single.auto] / cell.medians[cell.auto]
        lines.append(
            f"| {shape.name}, batch {batch}, k = {k} | {floor}× | {ratio:.1f}× | "
            f"{single.limit / cell.limit:.1f}× | {untouched} | {cell.speedup(STACKED)} | "
            f"{cell.speedup(LOOP)} | {cell.medians[STACKED] / cell.limit:.1f}× |"
        )
    lines += [f"{row} | | | | | |" for row in _worst_over_limit(results, "int8")]
    worst = max(integers.values(), key=lambda cell: cell.auto_slack)
    lines.append(
        f"| `auto` over the best lowering, worst of {len(integers)} cells | ≤ 15% | "
        f"{worst.auto_slack:.0%} ({worst.shape.name}, batch {worst.batch}, k = {worst.k}) "
        "| | | | | |"
    )
    return "\n".join(lines)


def targets_table(results: Results) -> str:
    """Returns the speed targets as Markdown, each with what was measured and what is possible."""
    grid = {(cell.shape, cell.batch, cell.k): cell for cell in cells(results)}
    few, many = SHAPES
    lines = [
        "| target | asked | vs stacked | vs loop | most that memory and cores allow, vs stacked |",
        "|---|---|---|---|---|",
    ]
    for shape, batch, k, floor in ((few, 1, 2, 14), (few, 100, 2, 9), (many, 1, 16, 8)):
        cell = grid[shape, batch, k]
        stacked = cell.medians[STACKED]
        lines.append(
            f"| {shape.name}, batch {batch}, k = {k}: times PyTorch's dense layer | {floor}× | "
            f"{cell.speedup(STACKED)} | {cell.speedup(LOOP)} | "
            f"{stacked / cell.limit:.1f}× ({cell.limit:.1f} ms) |"
        )
    for shape in SHAPES:
        n = shape.experts
        quarter, whole = grid[shape, 1, n // 4], grid[shape, 1, n]
        ratio = quarter.medians[quarter.auto] / whole.medians[whole.auto]
        lines.append(f"| {shape.name}, batch 1: t(k = n/4) / t(k = n) | ≤ 0.30 | {ratio:.2f} | | |")
    lines += [f"{row} | | |" for row in _worst_over_limit(results, "fp32")]
    worst = max(grid.values(), key=lambda cell: cell.auto_slack)
    lines.append(
        f"| `auto` over the best lowering, worst of {len(grid)} cells | ≤ 15% | "
        f"{max(0.0, worst.auto_slack):.0%} ({worst.shape.name}, batch {worst.batch}, "
        f"k = {worst.k}) | | |"
    )
    return "\n".join(lines)


LIMITS = {1: 1.5, 100: 2.0}
"""By batch: how many times the limit a layer may take, for k from n to n/8."""


def _worst_over_limit(results: Results, precision: Precision) -> Iterator[str]:
    """The first columns of a target's row: the worst cell over its limit, by batch."""
    for batch, bound in LIMITS.items():
        asked = [
            cell
            for cell in cells(results, (*SHAPES, LARGE), precision)
            if cell.batch == batch and cell.k in cell.shape.integer_ks
        ]
        worst = max(asked, key=lambda cell: cell.over_limit)
        yield (
            f"| batch {batch}, k = n to n/8: time over limit, worst of {len(asked)} cells | "
            f"≤ {bound} | {worst.over_limit:.2f} ({worst.shape.name}, k = {worst.k})"
        )


def mumoe_table(results: Results) -> str:
    """Returns the muMoE layers as Markdown, beside the least time that the machine needs for each.

    That is the weights streamed from memory, or the multiply-adds at the rate of a large matmul,
    whichever takes longer; weights that stay in a cache may take less.
    """
    lines = [
        "| layer | tokens | multiply-adds | asked | PyTorch, published | einsum alone | FP32 | "
        "vs published | vs einsum | limit | over limit | INT8 | vs published | vs einsum | "
        "vs FP32 | limit | over limit |",
        "|" + "---|" * 17,
    ]
    for candidate in SUBJECTS:
        rows = {(row.engine, row.precision): row for row in results.of_model(candidate.name)}
        medians = {
            key: row.latency_ms.median for key, row in rows.items() if row.latency_ms is not None
        }
        published, einsum = medians[PYTORCH_EAGER, "fp32"], medians[REFERENCE, "fp32"]
        single = medians[ONNXRUNTIME, "fp32"]
        integers = medians[ONNXRUNTIME, "int8"]
        _, *beside_single = _beside_limit(single, rows[ONNXRUNTIME, "fp32"].limit_ms)
        _, *beside_integers = _beside_limit(integers, rows[ONNXRUNTIME, "int8"].limit_ms)
        macs = sum(candidate.spec.macs(candidate.tokens, candidate.spec.experts).values())
        lines.append(
            f"| {candidate.name} | {candidate.tokens} | {count(macs)} | {candidate.asked:g}× | "
            f"{_ms(published)} | {_ms(einsum)} | {_ms(single)} | {_times(published, single)} | "
            f"{_times(einsum, single)} | {' | '.join(beside_single)} | "
            f"{_ms(integers)} | {_times(published, integers)} | {_times(einsum, integers)} | "
            f"{_times(single, integers)} | {' | '.join(beside_integers)} |"
        )
    return "\n".join(lines)


def model_table(results: Results, batch: int | None = None) -> str:
    """Returns whole models as Markdown: medians in ms for every k, beside their limits.

    Only one batch size where that is given.
    """
    lines = [
        "| model | batch | k | PyTorch eager | `torch.compile` | `torch.onnx` | exported, `auto` | "
        "limit | over limit | vs eager | vs compile | vs `torch.onnx` | INT8 | limit | "
        "over limit | vs eager |",
        "|" + "---|" * 16,
    ]
    for model in results.models:
        rows = [row for row in results.of_model(model.name) if row.latency_ms is not None]
        medians = {
            (row.batch, str(row.lowering), row.k): row.latency_ms.median
            for row in rows
            if row.latency_ms is not None
        }
        limits = {(row.batch, str(row.lowering), row.k): row.limit_ms for row in rows}
        for row in rows:
            if row.lowering != AUTO or batch not in (None, row.batch):
                continue
            n, ours = row.experts, medians[row.batch, AUTO, row.k]
            whole = [medians.get((row.batch, name, n)) for name in (EAGER, COMPILED, PLAIN)]
            integers = medians.get((row.batch, INT8, row.k))
            columns = [_ms(m) for m in whole]
            columns += _beside_limit(ours, row.limit_ms)
            columns += [_times(m, ours) for m in whole]
            columns += _beside_limit(integers, limits.get((row.batch, INT8, row.k)))
            columns += [_times(whole[0], integers)]
            lines.append(f"| {model.name} | {row.batch} | {row.k} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _beside_limit(ms: float | None, limit: float | None) -> list[str]:
    """A time, the least time for it, and the one over the other."""
    over = "–" if ms is None or limit is None else f"{ms / limit:.2f}"
    return [_ms(ms), _ms(limit), over]


def _times(slower: float | None, faster: float | None) -> str:
    return "–" if slower is None or faster is None else f"{slower / faster:.1f}×"


def scale_table(measured: list[Scale]) -> str:
    """Returns the exports of large models as Markdown."""
    lines = [
        "| experts | checkpoint | parameters | weights | export | load | trace | write | check | "
        "hash | peak memory | × the weights |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| n={one.experts}, h={one.hidden} | {one.stored} | {count(one.parameters)} | "
        f"{size(one.weights_bytes)} | {one.seconds:.0f} s | "
        + " | ".join(f"{one.steps[step]:.1f} s" for step in EXPORT_STEPS)
        + f" | {size(one.peak_bytes)} | {one.peak_bytes / one.weights_bytes:.2f} |"
        for one in measured
    ]
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
