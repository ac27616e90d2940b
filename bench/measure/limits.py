"""The work of every row of a benchmark, and the least time that the machine needs for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from ...common import timing
from ...errors import TraceError
from ..data import Array
from ..results import Work
from ..runners.pytorch import Candidate, Case, GraphSource
from .roofline import (
    FP32_BYTES,
    NO_PRODUCTS,
    STREAM_BYTES,
    IntegerLinear,
    ModelWork,
    Part,
    Probes,
    Products,
    Rates,
    limit_ms,
    work_of,
)

SMALLEST_STREAM_BYTES = 1 << 20
"""Of less, the sum that measures the bandwidth is mostly the call."""

SQUARE = 1024
"""Rows of the matrices whose product is timed: 20 ms on a core, at the rate of larger ones."""

NUMBER_BYTES: Mapping[str, int] = {"fp16": 2, "bf16": 2}
"""Of a precision that has not four: INT8 is FP32 around its experts on a CPU."""

NO_GPU_RATES = "the rates of a GPU are not measured"


@dataclass(frozen=True, slots=True)
class Limit:
    """What a row asks of the machine and the least time for it; `reason` says why one is absent."""

    work: Work | None = None
    limit_ms: float | None = None
    reason: str | None = None


class Limits:
    """What the rows of a candidate ask of the machine.

    `cases` are the probes to time beside the rows. They stream as many bytes as the model's
    weights hold: what fits in a cache is read at the cache's rate, by the model and by the probe.
    """

    def __init__(self, candidate: Candidate, x: Array, cases: Iterable[Case]) -> None:
        weights = sum(p.nbytes for p in candidate.model.module.parameters())
        self._probes = Probes(
            torch.get_num_threads(),
            stream_bytes=min(max(weights, SMALLEST_STREAM_BYTES), STREAM_BYTES),
            square=SQUARE,
            integer=any(c.precision == "int8" for c in cases),
        )
        axes = zip(candidate.model.input.shape, (1, *x.shape[1:]), strict=False)
        self._sizes = {name: size for name, size in axes if isinstance(name, str)}
        self._work: ModelWork | None = None
        self._reason = ""
        try:
            self._work = work_of(candidate.model, x)
        except TraceError as error:
            self._reason = error.message
        except Exception as error:  # noqa: BLE001  a stranger's network: the row says what failed
            self._reason = f"the backbone's work: {timing.in_one_line(error)}"

    @property
    def cases(self) -> Mapping[str, timing.Case]:
        """The probes, by their names."""
        return self._probes.cases

    def rates(self, measured: timing.Measured) -> Rates | str:
        """Returns the rates that the probes found, or why there are none."""
        for name in self.cases:
            if name in measured.failures:
                return f"{name}: {measured.failures[name]}"
        return self._probes.rates(measured.latencies)

    def of(self, case: Case, graph: GraphSource | None, batch: int, rates: Rates | str) -> Limit:
        """Returns the work of a row and the least time for it; `graph` is the row's, if it is one.

        A GPU's row has no limit. 16-bit numbers are counted with two bytes and multiplied at the
        rate of FP32: so ONNX Runtime does on a CPU.
        """
        if self._work is None:
            return Limit(reason=self._reason)
        try:
            parts = self._parts(self._work, case, graph, batch)
        except TraceError as error:
            return Limit(reason=error.message)
        work = Work(
            operations=2 * sum(part.macs for part in parts if not part.integer),
            int8_operations=2 * sum(part.macs for part in parts if part.integer),
            bytes=sum(part.bytes for part in parts),
        )
        if case.provider != "cpu":
            return Limit(work, reason=NO_GPU_RATES)
        if isinstance(rates, str):
            return Limit(work, reason=rates)
        return Limit(work, limit_ms(parts, rates))

    def _parts(
        self, work: ModelWork, case: Case, graph: GraphSource | None, batch: int
    ) -> tuple[Part, ...]:
        layers = work.model.layers
        kept = {name: min(case.k, layer.spec.experts) for name, layer in layers.items()}
        floating: frozenset[str] = frozenset()
        int8_backbone = NO_PRODUCTS
        if graph is not None:
            kept |= graph.kept
            floating = graph.floating
            int8_backbone = products_of(graph.integers, self._sizes)
        return work.parts(
            kept,
            batch,
            int8=layers.keys() - floating if case.precision == "int8" else (),
            int8_backbone=int8_backbone,
            number_bytes=NUMBER_BYTES.get(case.precision, FP32_BYTES),
        )


def products_of(linears: Iterable[IntegerLinear], sizes: Mapping[str, int]) -> Products:
    """Returns what the linear layers of a backbone ask for, for one input of the named `sizes`.

    Raises `TraceError` where the graph does not tell how many rows one multiplies.
    """
    macs = numbers = 0
    for linear in linears:
        found = linear.macs(sizes)
        if found is None:
            raise TraceError(f"the graph does not tell how many rows {linear.node} multiplies")
        macs += found
        numbers += prod(linear.weights)
    return Products(macs, numbers)
