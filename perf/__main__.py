"""`python -m perf [NAME…]`: measures, prints tables, keeps results as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moexport.bench.results import Results, read, write

from . import auto, calibration, fit, layers, models, mumoe, scale, startup
from .tables import (
    integer_table,
    integer_targets_table,
    layer_table,
    model_table,
    mumoe_table,
    targets_table,
)

RESULTS = Path(__file__).parent / "results"
LAYERS = tuple(RESULTS / f"{name}.json" for name in ("layers-cpu", "layers-vnni-cpu"))
"""The grid of the speed targets, as two machines measured it."""
MINUTES = "--minutes="


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: `measure` writes its results to `file`, `tables` says what that holds."""

    file: Path
    measure: Callable[[Path], None]
    tables: Callable[[Path], str]


def main(arguments: list[str]) -> None:
    """Runs the named benchmarks, all without a name.

    `tables` prints what was kept, `fit` what it says of the cost model; `--minutes=12` is what
    `auto` may take.
    """
    minutes = [float(each.partition("=")[2]) for each in arguments if each.startswith(MINUTES)]
    wanted = [each for each in arguments if not each.startswith(MINUTES)] or list(BENCHMARKS)
    unknown = set(wanted) - {*BENCHMARKS, "tables", "fit"}
    if unknown:
        known = ", ".join(BENCHMARKS)
        sys.exit(f"error: no benchmark {', '.join(sorted(unknown))}: use {known}, tables or fit")
    for name, benchmark in BENCHMARKS.items():
        if name in wanted:
            if minutes and name == "auto":
                auto.measure(benchmark.file, layers.to_stderr, minutes[0])
            else:
                benchmark.measure(benchmark.file)
        if name in wanted or ("tables" in wanted and benchmark.file.exists()):
            print(benchmark.tables(benchmark.file), end="\n\n")
    if "fit" in wanted:
        cells = auto.read_cells(BENCHMARKS["auto"].file, auto.FITTED)
        print(fit.report([read(file) for file in LAYERS], cells))


def _timed(
    name: str, run: Callable[..., Iterable[Results]], *tables: Callable[[Results], str]
) -> Benchmark:
    """A benchmark whose results are rows; what there is so far is written again and again."""

    def measure(file: Path) -> None:
        for so_far in run(progress=layers.to_stderr):
            write(so_far, file)

    def shown(file: Path) -> str:
        results = read(file)
        return "\n\n".join(table(results) for table in tables)

    return Benchmark(RESULTS / f"{name}-cpu.json", measure, shown)


BENCHMARKS: Mapping[str, Benchmark] = {
    "layers": _timed(
        "layers",
        layers.run,
        targets_table,
        layer_table,
        integer_targets_table,
        integer_table,
    ),
    "auto": Benchmark(
        RESULTS / "auto-cpu.json", partial(auto.measure, progress=layers.to_stderr), auto.table
    ),
    "models": _timed("models", models.run, model_table),
    "mumoe": _timed("mumoe", mumoe.run, mumoe_table),
    "scale": Benchmark(RESULTS / "scale-cpu.json", scale.measure, scale.table),
    "engine-scale": Benchmark(
        RESULTS / "engine-scale.json", scale.measure_engine, scale.engine_table
    ),
    "startup": Benchmark(RESULTS / "startup-cpu.json", startup.measure, startup.table),
    "calibration": Benchmark(
        RESULTS / "calibration-cpu.json",
        partial(calibration.run, progress=layers.to_stderr),
        calibration.tables,
    ),
}


if __name__ == "__main__":
    main(sys.argv[1:])
