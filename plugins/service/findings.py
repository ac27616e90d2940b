"""What a service reached in each scenario, as frozen data that goes into `results.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.documents import from_data

SERVICE = "service"
"""Where services stand among the analyses of `results.json`."""

MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedRun:
    """A run of server at a rate that was offered: how long requests took, how many were refused."""

    offered: float
    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Instances of a model, threads of each, and what they answer a second from a full queue."""

    instances: int
    threads: int
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What one engine with one k reached in a scenario, by MLPerf's LoadGen.

    `rate` is in requests a second: of server the highest that keeps the bound, or the one that was
    `fixed_rate`. The percentiles are those of that run; LoadGen found it `valid`, or `reason` says
    why not. A service without a rate kept no bound, and `reason` has the nearest, `nearest_ms`; one
    that failed says so there. `layouts` are those that were tried, of which it has the fastest.
    `logs` is the folder of LoadGen's own, beside `results.json`. Of a language model a request is a
    prompt of `tokens`.
    """

    model: str
    engine: str
    provider: str
    precision: str
    lowering: str | None
    k: int
    experts: int
    scenario: str
    max_batch: int
    instances: int
    threads: int
    layouts: tuple[Layout, ...] = ()
    bound_ms: float | None = None
    fixed_rate: float | None = None
    valid: bool = False
    reason: str = ""
    rate: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    nearest_ms: float | None = None
    offered: tuple[OfferedRun, ...] = ()
    logs: str = ""
    tokens: int | None = None

    @property
    def exported(self) -> bool:
        """Whether it runs a graph, not PyTorch."""
        return not self.engine.startswith("pytorch")

    @property
    def reached(self) -> str:
        """The scenario and its result in words: `server: 310 requests/s at p99 ≤ 20 ms`."""
        if self.rate is None:
            return f"{self.scenario}: {self.reason}"
        bound = "" if self.bound_ms is None else f" at p99 ≤ {self.bound_ms:g} ms"
        if self.fixed_rate is not None:
            bound = f" of {self.fixed_rate:g} offered"
        words = [f"{self.scenario}: {requests(self.rate)}{bound}"]
        if self.scenario != "offline":
            words.append(f"p50 {self.p50_ms:.3g}, p99 {self.p99_ms:.3g} ms")
        if not self.valid:
            words.append(f"not valid: {self.reason}")
        return "; ".join(words)

    def cost_of_a_million(self, price_per_hour: float | None) -> float | None:
        """What a million requests cost on a machine of this price; None where it is not known."""
        if price_per_hour is None or not self.rate:
            return None
        return price_per_hour / 3600 / self.rate * MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFindings:
    """All services of a benchmark, and how they were measured."""

    services: tuple[Service, ...]
    duration_s: float
    max_delay_ms: float
    library: int
    price_per_hour: float | None = None

    def of(self, scenario: str) -> tuple[Service, ...]:
        """The services of a scenario."""
        return tuple(service for service in self.services if service.scenario == scenario)


def requests(rate: float) -> str:
    """Returns a rate as a reader wants it: `310 requests/s`, `2.5 requests/s`."""
    return f"{rate:,.0f} requests/s" if rate >= 10 else f"{rate:.2g} requests/s"


def as_analyses(findings: ServiceFindings) -> dict[str, Any]:
    """Returns findings as an analysis of a results file: plain data, as they are read again."""
    import msgspec

    return {SERVICE: msgspec.to_builtins(findings)}


def services_in(
    analyses: Mapping[str, Any], *, name: str = "results.json"
) -> ServiceFindings | None:
    """Returns what a results file says of services, None where nothing was served.

    Raises ResultsError that names the file and the field that cannot be read.
    """
    if SERVICE not in analyses:
        return None
    return from_data(ServiceFindings, analyses[SERVICE], name, at=f"analyses.{SERVICE}")


def best(services: Sequence[Service]) -> Service | None:
    """Returns the service of the highest rate, None where none has one."""
    served = [service for service in services if service.rate]
    return max(served, key=lambda service: service.rate or 0.0, default=None)
