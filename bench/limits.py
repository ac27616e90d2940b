"""The work of every row of a benchmark, and the least time that the machine needs for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..errors import TraceError
from ..exporter import timing
from .data import Array
from .engines import Contestant, GraphSource, Subject
from .results import Work
from .roofline import FP32_BYTES, STREAM_BYTES, ModelWork, Part, Probes, Rates, limit_ms, work_of

SMALLEST_STREAM_BYTES = 1 << 20
"""Of less, the sum that measures the bandwidth is mostly the call."""

SQUARE = 1024
"""Rows of the matrices whose product is timed: 20 ms on a core, at the rate of larger ones."""

NUMBER_BYTES: Mapping[str, int] = {"fp16": 2, "bf16": 2}
"""Of a precision that has not four: INT8 is FP32 around its experts on a CPU."""

NO_GPU_RATES = "the rates of a GPU are not measured"
INT8_HOST = "how much of the host's work is INT8 is not counted"


@dataclass(frozen=True, slots=True)
class Limit:
    """What a row asks of the machine and the least time for it; `reason` says why one is absent."""

    work: Work | None = None
    limit_ms: float | None = None
    reason: str | None = None


class Limits:
    """What the rows of a subject ask of the machine.

    `contestants` are the probes to time beside the rows. They stream as many bytes as the model's
    weights hold: what fits in a cache is read at the cache's rate, by the model and by the probe.
    """

    def __init__(self, subject: Subject, x: Array, contestants: Iterable[Contestant]) -> None:
        weights = sum(p.nbytes for p in subject.model.module.parameters())
        self._probes = Probes(
            torch.get_num_threads(),
            stream_bytes=min(max(weights, SMALLEST_STREAM_BYTES), STREAM_BYTES),
            square=SQUARE,
            integer=any(c.precision == "int8" for c in contestants),
        )
        self._work: ModelWork | None = None
        self._reason = ""
        try:
            self._work = work_of(subject.model, x)
        except TraceError as error:
            self._reason = error.message
        except Exception as error:  # noqa: BLE001  a stranger's network: the row says what failed
            self._reason = f"the host's work: {timing.in_one_line(error)}"

    @property
    def contestants(self) -> Mapping[str, timing.Contestant]:
        """The probes, by their names."""
        return self._probes.contestants

    def rates(self, measured: timing.Measured) -> Rates | str:
        """Returns the rates that the probes found, or why there are none."""
        for name in self.contestants:
            if name in measured.failures:
                return f"{name}: {measured.failures[name]}"
        return self._probes.rates(measured.latencies)

    def of(
        self, contestant: Contestant, graph: GraphSource | None, batch: int, rates: Rates | str
    ) -> Limit:
        """Returns the work of a row and the least time for it; `graph` is the row's, if it is one.

        A GPU's row has no limit. 16-bit numbers are counted with two bytes and multiplied at the
        rate of FP32: so ONNX Runtime does on a CPU.
        """
        if self._work is None:
            return Limit(reason=self._reason)
        if graph is not None and graph.int8_host:
            return Limit(reason=INT8_HOST)
        parts = self._parts(self._work, contestant, graph, batch)
        work = Work(
            operations=2 * sum(part.macs for part in parts if not part.integer),
            int8_operations=2 * sum(part.macs for part in parts if part.integer),
            bytes=sum(part.bytes for part in parts),
        )
        if contestant.provider != "cpu":
            return Limit(work, reason=NO_GPU_RATES)
        if isinstance(rates, str):
            return Limit(work, reason=rates)
        return Limit(work, limit_ms(parts, rates))

    def _parts(
        self, work: ModelWork, contestant: Contestant, graph: GraphSource | None, batch: int
    ) -> tuple[Part, ...]:
        layers = work.model.layers
        kept = {name: min(contestant.k, layer.spec.experts) for name, layer in layers.items()}
        floating: frozenset[str] = frozenset()
        if graph is not None:
            kept |= graph.kept
            floating = graph.floating
        return work.parts(
            kept,
            batch,
            int8=layers.keys() - floating if contestant.precision == "int8" else (),
            number_bytes=NUMBER_BYTES.get(contestant.precision, FP32_BYTES),
        )
