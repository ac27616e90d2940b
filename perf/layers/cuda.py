"""Fits the rates of `ort-cuda` to a network that was timed on a card: `python -m perf cuda`.

The network was exported with each lowering. The time around the MoE layers is a constant for each
precision, batch and way of running, so the differences between rows determine the rates. The rates
of reading and multiplying are from the data sheet, because no row can separate them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from moexport.graphs.layers.soft_moe import SoftMoESpec
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import SoftMoEPlan
from moexport.graphs.lowerings.choice import choose
from moexport.graphs.lowerings.cost import rates_of
from moexport.graphs.targets import TARGETS, Machine, Precision
from scipy.optimize import least_squares

from ..measure import kept

TARGET = "ort-cuda"

FITTED: tuple[str, ...] = ("node_us", "launch_us", "branch_us")
"""The rates that all precisions share."""

COPIED = "copy_bytes_per_us"
"""The rate that each precision has separately."""

LEAST_SPREAD = 0.02
"""The smallest relative spread of a row's rounds: rows with less spread count no more."""

PENALTY = 0.02
"""The penalty for changing a rate by a factor e, in residuals: rates with little data stay."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One row: the lowering of all MoE layers, and the milliseconds of the whole network."""

    lowering: str
    work: SoftMoEPlan
    cuda_graph: bool
    ms: float
    spread_ms: float

    @property
    def group(self) -> tuple[str, int, bool]:
        """The key that rows share if they differ only in the MoE layers."""
        return self.work.precision, self.work.batch, self.cuda_graph


@dataclass(frozen=True, slots=True)
class Network:
    """The network that was timed: its MoE layers, and the nodes and parameters of the whole."""

    spec: SoftMoESpec
    layers: int
    tokens: int
    nodes: int
    parameters: int


def network(body: Any) -> Network:
    """Returns the network of a file of results."""
    facts = body["model"]
    sizes = {name: facts[name] for name in ("experts", "slots", "dim", "hidden")}
    spec = SoftMoESpec(facts["name"], out=facts["dim"], norm="l2", **sizes)
    return Network(spec, facts["layers"], facts["tokens"], facts["nodes"], facts["parameters"])


def read_rows(file: Path) -> tuple[Network, list[Timed]]:
    """Returns the entries of a file of results for which lowerings have predictions.

    Rows with all experts are omitted unless they are `dense`: with k as an input, `gather` copied
    all experts, but predictions are for a graph of k = n, which copies none.
    """
    body = kept(file)
    timed = network(body)
    rows = [
        Timed(
            row["lowering"],
            SoftMoEPlan(timed.spec, row["k"], row["batch"], timed.tokens, row["precision"]),
            row["cuda_graph"],
            row["ms"],
            row["spread_ms"],
        )
        for row in body["rows"]
        if row["lowering"] == "dense" or row["k"] < timed.spec.experts
    ]
    return timed, rows


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted rates, those of copies by precision, and the relative error of each row."""

    rates: Mapping[str, float]
    copied: Mapping[Precision, float]
    off: Sequence[float]


def machines(rates: Mapping[str, float], copied: Mapping[Precision, float]) -> dict[str, Machine]:
    """Returns the machine of each measured precision, with other rates."""
    values: dict[str, Any] = dict(rates)
    return {
        each: replace(
            rates_of(TARGETS[TARGET].machine)[each], **values, copy_bytes_per_us=bytes_per_us
        )
        for each, bytes_per_us in copied.items()
    }


def layer_us(timed: Timed, machine: Machine) -> float:
    """Returns the predicted time of one layer as it ran: with launches unless in a CUDA graph."""
    if not timed.cuda_graph:
        machine = replace(machine, node_us=machine.node_us + machine.launch_us, launch_us=0.0)
    return lowerings_of("soft-moe")[timed.lowering].predict_us(timed.work, machine)


def fitted(timed: Network, rows: Sequence[Timed]) -> Fit:
    """Returns the rates that predict the rows best.

    At batch 1 in FP16, the time of the whole network depends only on nodes and bytes: with and
    without a CUDA graph, it determines the time of a node and of its launch. The time to select k
    experts, mainly TopK, is the same for every lowering and has a separate constant.
    """
    precisions: list[Precision] = sorted({row.work.precision for row in rows})
    groups = sorted({row.group for row in rows})
    now = rates_of(TARGETS[TARGET].machine)
    start = [getattr(now["fp16"], name) for name in FITTED]
    start += [now[each].copy_bytes_per_us for each in precisions]
    first = np.log([*start, 20.0, *(_least(rows, group) for group in groups)])

    def unpacked(logarithms: np.ndarray) -> tuple[dict[str, float], dict[Precision, float]]:
        values = np.exp(logarithms).tolist()
        copied = values[len(FITTED) : len(FITTED) + len(precisions)]
        return (dict(zip(FITTED, values, strict=False)), dict(zip(precisions, copied, strict=True)))

    def predicted(logarithms: np.ndarray) -> list[float]:
        by_precision = machines(*unpacked(logarithms))
        selecting, *around = np.exp(logarithms[len(start) :]).tolist()
        return [
            1e3 * around[groups.index(row.group)]
            + timed.layers
            * (
                layer_us(row, by_precision[row.work.precision])
                + selecting * (row.work.typical_k < timed.spec.experts)
            )
            for row in rows
        ]

    def residuals(logarithms: np.ndarray) -> list[float]:
        off = [_residual(us, row) for us, row in zip(predicted(logarithms), rows, strict=True)]
        rates, _ = unpacked(logarithms)
        whole = [
            math.log(
                _whole_us(timed, rates, now["fp16"], launched=not row.cuda_graph) / row.ms / 1e3
            )
            / max(LEAST_SPREAD, row.spread_ms / row.ms)
            for row in rows
            if row.group[:2] == ("fp16", 1) and row.work.typical_k == timed.spec.experts
        ]
        return [*off, *whole, *(PENALTY * (logarithms - first)).tolist()]

    found = least_squares(residuals, first, loss="soft_l1").x
    off = [us / (1e3 * row.ms) - 1 for us, row in zip(predicted(found), rows, strict=True)]
    rates, copied = unpacked(found)
    return Fit(rates, copied, off)


def _residual(us: float, row: Timed) -> float:
    """Returns how far a prediction is from a row, in units of the rounds' spread."""
    return math.log(us / (1e3 * row.ms)) / max(LEAST_SPREAD, row.spread_ms / row.ms)


def _whole_us(
    timed: Network, rates: Mapping[str, float], machine: Machine, *, launched: bool
) -> float:
    """Returns the time of the whole network at batch 1, from its nodes and bytes."""
    node = rates["node_us"] + (rates["launch_us"] if launched else 0.0)
    return timed.nodes * node + 4.0 * timed.parameters / machine.bytes_per_us


def _least(rows: Sequence[Timed], group: tuple[str, int, bool]) -> float:
    """Returns the initial value of the time around the layers, in milliseconds."""
    return 0.6 * min(row.ms for row in rows if row.group == group)


@dataclass(frozen=True, slots=True)
class Cell:
    """The measurements of several lowerings at one size, and the choice of `auto`."""

    work: SoftMoEPlan
    cuda_graph: bool
    ms: Mapping[str, float]
    chosen: str

    @property
    def slack(self) -> float:
        """How much slower the choice is than the fastest lowering, 0.1 for 10%."""
        return self.ms[self.chosen] / min(self.ms.values()) - 1


def cells(rows: Sequence[Timed]) -> list[Cell]:
    """Returns the sizes at which the choice of `auto` and another lowering were measured.

    There are none for k = n, for which only `dense` counts.
    """
    found: dict[tuple[SoftMoEPlan, bool], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row.work, row.cuda_graph), {})[row.lowering] = row.ms
    chosen = {key: choose(key[0], TARGET).lowering.name for key in found}
    return [
        Cell(*key, ms, chosen[key])
        for key, ms in found.items()
        if len(ms) > 1 and chosen[key] in ms
    ]


def report(file: Path) -> str:
    """Returns the fitted rates next to those in use, and how good the choices of `auto` are."""
    timed, rows = read_rows(file)
    found = fitted(timed, rows)
    now = rates_of(TARGETS[TARGET].machine)
    gpu = kept(file)["environment"]["gpu"][0]["name"]
    lines = [f"{TARGET}, fitted to {len(rows)} times of {timed.spec.name} on {gpu}:"]
    lines += [
        f"    {name} = {value:.3g}  (now {getattr(now['fp16'], name):.3g})"
        for name, value in found.rates.items()
    ]
    lines += [
        f"    {COPIED} = {value:.3g} in {name}  (now {now[name].copy_bytes_per_us:.3g})"
        for name, value in found.copied.items()
    ]
    worst = max(cells(rows), key=lambda cell: cell.slack)
    lines.append(
        f"`auto` at most {worst.slack:.0%} slower than the best of {len(cells(rows))} sizes "
        f"({worst.work.precision}, batch {worst.work.batch}, k = {worst.work.k})"
    )
    return "\n".join(lines)
