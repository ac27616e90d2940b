"""The settings of services, parsed from the options of `bench`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from ...bench.request import BenchRequest
from ...common.option import changed, refuse_changed
from ...common.text import near_miss, parse_seconds, split_list
from ...errors import UsageError
from .loadgen import Scenario, loadgen
from .request import ServiceOptions
from .triton import TritonModel, triton_client

MIN_BOUNDS = 10  # the minimum duration of a run, in latency bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The settings of services, parsed."""

    scenarios: tuple[Scenario, ...]
    duration_s: float
    max_delay_s: float
    bound_s: float | None
    rate: float | None
    library: int | None
    price_per_hour: float | None
    triton: TritonModel | None


def settings_of(request: BenchRequest) -> ServiceSettings | None:
    """Returns the settings of services, or None if no scenario is requested.

    Raises `UsageError` for invalid options, and `MissingExtraError` without LoadGen.
    """
    settings = parse(request.asked(ServiceOptions))
    if settings is None:
        return None
    loadgen()
    if settings.triton is not None:
        triton_client()
    return settings


def parse(options: ServiceOptions) -> ServiceSettings | None:
    """Parses the options; raises `UsageError` for invalid ones."""
    scenarios = options.scenario
    names = list(dict.fromkeys(split_list(scenarios) if isinstance(scenarios, str) else scenarios))
    for_server = ("latency_bound", "offered_rate")
    if not names:
        refuse_changed(options, changed(options), ": this option needs --scenario")
        return None
    known = get_args(Scenario)
    for name in names:
        if name in known:
            continue
        raise UsageError(
            f"--scenario {name}: there is no such scenario", hint=near_miss(name, known)
        )
    if "server" not in names:
        refuse_changed(options, for_server, ": only --scenario server uses this option")
    elif options.latency_bound is None:
        raise UsageError(
            "--scenario server: the latency bound is missing",
            hint="add, for example, --latency-bound 50ms",
        )
    for option, value in (
        ("--offered-rate", options.offered_rate),
        ("--price-per-hour", options.price_per_hour),
    ):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{option} {value:g}: a number above 0 is expected")
    bound, delay = options.latency_bound, options.max_delay
    duration_s = parse_seconds(options.duration, "--duration", "s")
    bound_s = None if bound is None else parse_seconds(bound, "--latency-bound", "ms")
    if bound_s is not None and duration_s < MIN_BOUNDS * bound_s:
        # If the rate is too high, requests must have time to pile up beyond the bound in a run.
        raise UsageError(
            f"--duration {options.duration}: too short for a latency bound of {bound}",
            hint=f"use at least --duration {MIN_BOUNDS * bound_s:g}s",
        )
    triton = None if options.triton is None else TritonModel.parse(options.triton)
    return ServiceSettings(
        scenarios=tuple(name for name in known if name in names),
        duration_s=duration_s,
        max_delay_s=0.0 if delay is None else parse_seconds(delay, "--max-delay", "ms"),
        bound_s=bound_s,
        rate=options.offered_rate,
        library=options.library,
        price_per_hour=options.price_per_hour,
        triton=triton,
    )
