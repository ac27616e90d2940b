"""The results of services in each scenario, as frozen data for `results.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.documents import from_data

SERVICE = "service"
"""The key of the services in the analyses of `results.json`."""

MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedRun:
    """A `server` run at an offered rate: its latencies, and the number of refused requests."""

    offered: float
    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A number of instances and of threads per instance, with their rate from a full queue."""

    instances: int
    threads: int
    per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The result of one engine with one k in a scenario, measured by MLPerf's LoadGen.

    `rate` is in requests per second; for `server` it is the highest within the bound, or the given
    `fixed_rate`. The percentiles are from the same run. LoadGen judged it `valid`, or `reason`
    explains why not. A service without a rate missed the bound or failed: `reason` has the nearest
    p99, `nearest_ms`, or the error. `layouts` were all tried; the fastest was used. `logs` is the
    folder of LoadGen's logs, next to `results.json`. For a language model, a request is a prompt of
    `tokens` tokens. `bundle` and `apart` are as in the row of the results.
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
    bundle: str | None = None
    apart: bool = False

    @property
    def exported(self) -> bool:
        """Whether the service runs a graph, not PyTorch."""
        return not self.engine.startswith("pytorch")

    @property
    def reached(self) -> str:
        """Describes the result in the scenario: `server: 310 requests/s at p99 ≤ 20 ms`."""
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
        """Returns the cost of a million requests at this price; None if it is unknown."""
        if price_per_hour is None or not self.rate:
            return None
        return price_per_hour / 3600 / self.rate * MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFindings:
    """All services of a benchmark, with the settings of their measurement."""

    services: tuple[Service, ...]
    duration_s: float
    max_delay_ms: float
    library: int
    price_per_hour: float | None = None

    def of(self, scenario: str) -> tuple[Service, ...]:
        """Returns the services of a scenario."""
        return tuple(service for service in self.services if service.scenario == scenario)


def requests(rate: float) -> str:
    """Formats a rate, such as `310 requests/s` or `2.5 requests/s`."""
    return f"{rate:,.0f} requests/s" if rate >= 10 else f"{rate:.2g} requests/s"


def as_analyses(findings: ServiceFindings) -> dict[str, Any]:
    """Returns findings as plain data for the analyses of a results file."""
    import msgspec

    return {SERVICE: msgspec.to_builtins(findings)}


def services_in(analyses: Mapping[str, Any]) -> ServiceFindings | None:
    """Returns the services in a results file, or None if nothing was served.

    Raises a `ResultsError` that names the field that cannot be read.
    """
    if SERVICE not in analyses:
        return None
    return from_data(ServiceFindings, analyses[SERVICE], "results.json", at=f"analyses.{SERVICE}")


def best(services: Sequence[Service]) -> Service | None:
    """Returns the service with the highest rate, or None if none has a rate."""
    served = [service for service in services if service.rate]
    return max(served, key=lambda service: service.rate or 0.0, default=None)
