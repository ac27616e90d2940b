"""`python -m perf [NAME…]`: measures, prints tables, and saves results as JSON."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moexport.bench.results import Results, read, write
from moexport.common.console import Console, Progress

from . import cache, calibration, experts, granite, models, profiles, runtimes, scale, startup, tune
from .generation import benchmark as generation
from .layers import auto, cuda, fit, mumoe, soft_moe, tables
from .measure import keep, kept

RESULTS = Path(__file__).parent / "results"
LAYERS = tuple(RESULTS / f"{name}.json" for name in ("layers-cpu", "layers-vnni-cpu"))
"""Results of the grid of speed targets from two machines."""
MINUTES, NETWORK, QUICK = "--minutes=", "--network=", "--quick"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: `measure` writes its results to `file`, and `tables` prints them."""

    file: Path
    measure: Callable[[Path, Progress], None]
    tables: Callable[[Path], str]


def main(arguments: list[str]) -> None:
    """Runs the named benchmarks, or all without a name.

    `tables` prints the saved results; `fit` and `cuda` print their findings on the cost model.
    `--minutes=12` limits the time of `auto`; `tune --network=vit` measures one network and keeps
    the rows of the others; `generation --quick` runs everything at tiny sizes and saves nothing.
    """
    if arguments == ["generation", QUICK]:
        with tempfile.TemporaryDirectory() as folder, Console() as console:
            figures = generation.measure(console, generation.QUICK)
            keep(Path(folder) / "kept.json", "generation", **figures)
            print(generation.table(kept(Path(folder) / "kept.json")))
        return
    minutes = [float(each.partition("=")[2]) for each in arguments if each.startswith(MINUTES)]
    single = [each.partition("=")[2] for each in arguments if each.startswith(NETWORK)]
    if single:
        _network(single[0])
        return
    wanted = [each for each in arguments if not each.startswith(MINUTES)] or list(BENCHMARKS)
    unknown = set(wanted) - {*BENCHMARKS, "tables", "fit", "cuda"}
    if unknown:
        known = ", ".join(BENCHMARKS)
        sys.exit(
            f"error: no benchmark {', '.join(sorted(unknown))}: use {known}, tables, fit or cuda"
        )
    for name, benchmark in BENCHMARKS.items():
        if name in wanted:
            measure = benchmark.measure
            if minutes and name == "auto":
                measure = partial(auto.measure, minutes=minutes[0])
            with Console() as console:
                measure(benchmark.file, console)
        if benchmark.file.exists() and (name in wanted or "tables" in wanted):
            print(benchmark.tables(benchmark.file), end="\n\n")
    if "fit" in wanted:
        cells = auto.read_cells(BENCHMARKS["auto"].file, auto.FITTED)
        print(fit.report([read(file) for file in LAYERS], cells))
    if "cuda" in wanted:
        print(cuda.report(RESULTS / "layers-cuda.json"))


def _network(name: str) -> None:
    if name not in tune.NETWORKS:
        sys.exit(f"error: no network {name}: use {', '.join(tune.NETWORKS)}")
    file = BENCHMARKS["tune"].file
    with Console() as console:
        tune.measure(file, console, name)
    if file.exists():
        print(tune.table(kept(file)))


def _rows(
    name: str, run: Callable[[Progress], Iterable[Results]], *tables: Callable[[Results], str]
) -> Benchmark:
    """Returns a benchmark whose results are rows; it writes intermediate results repeatedly."""

    def measure(file: Path, progress: Progress) -> None:
        for so_far in run(progress):
            write(so_far, file)

    def shown(file: Path) -> str:
        results = read(file)
        return "\n\n".join(table(results) for table in tables)

    return Benchmark(RESULTS / f"{name}-cpu.json", measure, shown)


def _figures(
    command: str,
    file: str,
    found: Callable[[Progress], Mapping[str, object] | None],
    table: Callable[[Any], str],
) -> Benchmark:
    """Returns a benchmark with its own figures; `found` returns None if it cannot run."""

    def measure(file: Path, progress: Progress) -> None:
        figures = found(progress)
        if figures is not None:
            keep(file, command, **figures)

    return Benchmark(RESULTS / file, measure, lambda file: table(kept(file)))


BENCHMARKS: Mapping[str, Benchmark] = {
    "layers": _rows(
        *("layers", soft_moe.run),
        *(tables.targets_table, tables.layer_table),
        *(tables.integer_targets_table, tables.integer_table),
    ),
    "auto": Benchmark(RESULTS / "auto-cpu.json", auto.measure, auto.table),
    "models": _rows("models", models.run, models.table),
    "runtimes": _rows("runtimes", runtimes.run, runtimes.table),
    "profiles": _figures("profiles", "profiles-cpu.json", profiles.measure, profiles.table),
    "mumoe": _rows("mumoe", mumoe.run, mumoe.table),
    "experts": _figures("experts", "experts-cpu.json", experts.measured, experts.table),
    "granite": _figures("granite", "granite-cpu.json", granite.measure, granite.table),
    "generation": _figures(
        "generation", "generation-cpu.json", generation.measure, generation.table
    ),
    "tune": Benchmark(RESULTS / "tune-cpu.json", tune.measure, lambda file: tune.table(kept(file))),
    "cache": _figures("cache", "cache-cpu.json", cache.measure, cache.table),
    "scale": _figures("scale", "scale-cpu.json", scale.measure, scale.table),
    "engine-scale": _figures(
        "engine-scale", "engine-scale.json", scale.measure_engine, scale.engine_table
    ),
    "startup": _figures("startup", "startup-cpu.json", startup.measure, startup.table),
    "calibration": _figures(
        "calibration", "calibration-cpu.json", calibration.measure, calibration.tables
    ),
}


if __name__ == "__main__":
    main(sys.argv[1:])
