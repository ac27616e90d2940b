"""Markdown tables from a results file of `benchmarks.layers`, and the targets beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moexport.bench.results import ONNXRUNTIME, PYTORCH_EAGER, Results, Row
from moexport.bench.timing import Latency
from moexport.console import count, size

from .layers import (
    ALGORITHM_2,
    BATCHES,
    LOOP,
    LOWERINGS,
    SHAPES,
    STACKED,
    TOKENS,
    Shape,
    chosen,
    spec_of,
)
from .mumoe import SUBJECTS
from .scale import Scale

AUTO_SLACK = 0.15
"""`auto` may be this much slower than the best lowering of a cell."""

DISTURBED = 0.5
"""Round medians that differ by more than this share say little of a ratio."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The medians of one shape, batch and k, in milliseconds, by what was measured."""

    shape: Shape
    batch: int
    k: int
    medians: dict[str, float]
    spreads: dict[str, float]

    def speedup(self, baseline: str) -> str:
        """How many times faster `auto` is, with ≈ where a round of either was disturbed."""
        ratio = self.medians[baseline] / self.medians[self.auto]
        disturbed = max(self.spreads[baseline], self.spreads[self.auto]) > DISTURBED
        return f"{'≈ ' if disturbed else ''}{ratio:.1f}×"

    @property
    def best(self) -> str:
        """The fastest lowering."""
        return min(
            (name for name in self.medians if name in LOWERINGS), key=self.medians.__getitem__
        )

    @property
    def auto(self) -> str:
        """The lowering that `auto` chooses."""
        return chosen(self.shape, self.k, self.batch)

    @property
    def auto_slack(self) -> float:
        """How much slower `auto` is than the best: 0.1 is 10%."""
        return self.medians[self.auto] / self.medians[self.best] - 1.0


def cells(results: Results) -> Iterator[Cell]:
    """Yields the grid that was measured, shape by shape, batch by batch, k falling.

    Of a cell that was measured twice, the first measurement counts.
    """
    for shape in SHAPES:
        for batch in BATCHES:
            for k in shape.ks:
                found: dict[str, Latency] = {}
                for row in results.rows:
                    same = (row.model, row.batch, row.k) == (shape.name, batch, k)
                    if same and row.latency_ms is not None:
                        found.setdefault(_name(row), row.latency_ms)
                if found:
                    medians = {name: latency.median for name, latency in found.items()}
                    spreads = {name: latency.spread for name, latency in found.items()}
                    yield Cell(shape, batch, k, medians, spreads)


def _name(row: Row) -> str:
    return ALGORITHM_2 if row.engine == "pytorch-algorithm-2" else str(row.lowering)


def layer_table(results: Results) -> str:
    """Returns the grid as Markdown: medians in ms, the choice of `auto` in bold."""
    lines = [
        "| layer | batch | k | PyTorch, stacked | PyTorch, loop | PyTorch, Algorithm 2 | "
        + " | ".join(f"`{name}`" for name in LOWERINGS)
        + " | `auto` vs stacked | vs loop |",
        "|" + "---|" * (8 + len(LOWERINGS)),
    ]
    for cell in cells(results):
        columns = [_ms(cell.medians.get(name)) for name in (STACKED, LOOP, ALGORITHM_2)]
        for name in LOWERINGS:
            text = _ms(cell.medians.get(name))
            columns.append(f"**{text}**" if name == cell.auto else text)
        columns += [cell.speedup(STACKED), cell.speedup(LOOP)]
        lines.append(f"| {cell.shape.name} | {cell.batch} | {cell.k} | {' | '.join(columns)} |")
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
            f"{stacked / limit_ms(results, cell):.1f}× ({limit_ms(results, cell):.1f} ms) |"
        )
    for shape in SHAPES:
        n = shape.experts
        quarter, whole = grid[shape, 1, n // 4], grid[shape, 1, n]
        ratio = quarter.medians[quarter.auto] / whole.medians[whole.auto]
        lines.append(f"| {shape.name}, batch 1: t(k = n/4) / t(k = n) | ≤ 0.30 | {ratio:.2f} | | |")
    worst = max(grid.values(), key=lambda cell: cell.auto_slack)
    lines.append(
        f"| `auto` over the best lowering, worst of {len(grid)} cells | ≤ 15% | "
        f"{max(0.0, worst.auto_slack):.0%} ({worst.shape.name}, batch {worst.batch}, "
        f"k = {worst.k}) | | |"
    )
    return "\n".join(lines)


def limit_ms(results: Results, cell: Cell) -> float:
    """Returns the least time of a cell on the machine that was measured, in milliseconds.

    The larger of streaming what must be moved once (the weights of the experts kept, all n at most;
    the tokens in and out) and of all multiply-adds at the rate of a large matmul. An estimate: it
    assumes that nothing stays in a cache and that moving and computing overlap.
    """
    spec = spec_of(cell.shape)
    active = min(cell.shape.experts, cell.k * cell.batch)
    tokens = cell.batch * TOKENS * (spec.dim + spec.out)
    gigabytes = 4e-9 * (active * spec.parameters_per_expert + tokens)
    gigaflops = 2e-9 * cell.batch * sum(spec.macs(TOKENS, cell.k).values())
    rates = results.protocol
    return 1e3 * float(max(gigabytes / stream_gb_s(results), gigaflops / rates["matmul_gflop_s"]))


def stream_gb_s(results: Results) -> float:
    """Returns the fastest streaming seen: the plain sum's, or what a layer of the grid reached.

    A layer that computes all experts at batch 1 reads all its weights once.
    """
    reached = [
        4e-6 * cell.k * spec_of(cell.shape).parameters_per_expert / min(cell.medians.values())
        for cell in cells(results)
        if cell.batch == 1 and cell.k == cell.shape.experts
    ]
    return max(float(results.protocol["stream_gb_s"]), *reached)


def mumoe_table(results: Results) -> str:
    """Returns the muMoE layers as Markdown, beside the least time that the machine needs for each.

    That is the weights streamed from memory, or the multiply-adds at the rate of a large matmul,
    whichever takes longer; weights that stay in a cache may take less.
    """
    lines = [
        "| layer | tokens | PyTorch eager | exported | speed-up | asked | multiply-adds | "
        "limit | time over limit |",
        "|" + "---|" * 9,
    ]
    for subject in SUBJECTS:
        rows = {row.engine: row.latency_ms for row in results.of_model(subject.name)}
        eager, exported = rows[PYTORCH_EAGER], rows[ONNXRUNTIME]
        assert eager is not None and exported is not None
        macs = sum(subject.spec.macs(subject.tokens, subject.spec.experts).values())
        computed = 2e-6 * macs / float(results.protocol["matmul_gflop_s"])
        streamed = 4e-6 * subject.spec.parameters / float(results.protocol["stream_gb_s"])
        limit = max(computed, streamed)
        lines.append(
            f"| {subject.name} | {subject.tokens} | {_ms(eager.median)} | {_ms(exported.median)} | "
            f"{eager.median / exported.median:.1f}× | {subject.asked:g}× | {count(macs)} | "
            f"{_ms(limit)} | {exported.median / limit:.2f} |"
        )
    return "\n".join(lines)


def scale_table(measured: list[Scale]) -> str:
    """Returns the exports of large models as Markdown."""
    lines = [
        "| experts | parameters | weights | load, trace, write, verify, hash | peak memory | "
        "× the weights |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| n={one.experts}, h={one.hidden} | {count(one.parameters)} | "
        f"{size(one.weights_bytes)} | {one.seconds:.0f} s | {size(one.peak_bytes)} | "
        f"{one.peak_bytes / one.weights_bytes:.2f} |"
        for one in measured
    ]
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
