"""What is asked of services, parsed from the options of `bench`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from ...bench.request import BenchRequest
from ...common.option import parse_seconds, refuse_changed
from ...common.text import listed, near_miss
from ...errors import UsageError
from .loadgen import Scenario, loadgen
from .triton import TritonModel, triton_client

BOUNDS = 10  # of latency, that a run lasts at least


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What is asked of services, parsed."""

    scenarios: tuple[Scenario, ...]
    duration_s: float
    max_delay_s: float
    bound_s: float | None
    rate: float | None
    library: int | None
    price_per_hour: float | None
    triton: TritonModel | None


def settings_of(request: BenchRequest) -> ServiceSettings | None:
    """Returns what is asked of services, None where nothing is.

    Raises `UsageError` for what cannot be meant, and `MissingExtraError` without LoadGen.
    """
    scenarios = request.scenario
    names = list(dict.fromkeys(listed(scenarios) if isinstance(scenarios, str) else scenarios))
    bounds = ("latency_bound", "offered_rate")
    own = (*bounds, "max_delay", "duration", "library", "price_per_hour", "triton")
    if not names:
        refuse_changed(request, own, ": no scenario is run (--scenario)")
        return None
    known = get_args(Scenario)
    for name in names:
        if name in known:
            continue
        raise UsageError(
            f"--scenario {name}: there is no such scenario", hint=near_miss(name, known)
        )
    if "server" not in names:
        refuse_changed(request, bounds, ": is for --scenario server alone")
    elif request.latency_bound is None:
        raise UsageError(
            "--scenario server: there is no bound of latency",
            hint="for example --latency-bound 50ms",
        )
    for option, value in (
        ("--offered-rate", request.offered_rate),
        ("--price-per-hour", request.price_per_hour),
    ):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{option} {value:g}: must be more than 0")
    bound, delay = request.latency_bound, request.max_delay
    duration_s = parse_seconds(request.duration, "--duration", "s")
    bound_s = None if bound is None else parse_seconds(bound, "--latency-bound", "ms")
    if bound_s is not None and duration_s < BOUNDS * bound_s:
        # Requests that come too fast for the system have to pile up before the run ends.
        raise UsageError(
            f"--duration {request.duration}: too short to tell what keeps {bound}",
            hint=f"--duration {BOUNDS * bound_s:g}s at least",
        )
    loadgen()
    triton = None if request.triton is None else TritonModel.parse(request.triton)
    if triton is not None:
        triton_client()
    return ServiceSettings(
        scenarios=tuple(name for name in known if name in names),
        duration_s=duration_s,
        max_delay_s=0.0 if delay is None else parse_seconds(delay, "--max-delay", "ms"),
        bound_s=bound_s,
        rate=request.offered_rate,
        library=request.library,
        price_per_hour=request.price_per_hour,
        triton=triton,
    )
