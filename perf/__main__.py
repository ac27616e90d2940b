"""`python -m perf [NAME…]`: measures, prints tables, keeps results as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moexport.bench.results import read, write

from . import calibration, engine_scale, fit, layers, models, mumoe, scale, startup
from .tables import (
    integer_table,
    integer_targets_table,
    layer_table,
    model_table,
    mumoe_table,
    scale_table,
    targets_table,
)

RESULTS = Path(__file__).parent / "results"
LAYERS = RESULTS / "layers-cpu.json"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: `measure` writes its results to `file`, `tables` says what that holds."""

    file: Path
    measure: Callable[[Path], None]
    tables: Callable[[Path], str]


def main(arguments: list[str]) -> None:
    """Runs the named benchmarks, all without a name.

    `tables` prints what was kept, `fit` what it says of the cost model.
    """
    wanted = arguments or list(BENCHMARKS)
    unknown = set(wanted) - {*BENCHMARKS, "tables", "fit"}
    if unknown:
        known = ", ".join(BENCHMARKS)
        sys.exit(f"error: no benchmark {', '.join(sorted(unknown))}: use {known}, tables or fit")
    for name, benchmark in BENCHMARKS.items():
        if name in wanted:
            benchmark.measure(benchmark.file)
        if name in wanted or ("tables" in wanted and benchmark.file.exists()):
            print(benchmark.tables(benchmark.file), end="\n\n")
    if "fit" in wanted:
        print(fit.report(read(LAYERS)))


def _layers(file: Path) -> None:
    for so_far in layers.run(progress=_to_stderr):
        write(so_far, file)


def _layer_tables(file: Path) -> str:
    results = read(file)
    tables = (targets_table, layer_table, integer_targets_table, integer_table)
    return "\n\n".join(table(results) for table in tables)


def _models(file: Path) -> None:
    for so_far in models.run(progress=_to_stderr):
        write(so_far, file)


def _mumoe(file: Path) -> None:
    write(mumoe.run(progress=_to_stderr), file)


def _scale(file: Path) -> None:
    """Exports ViT-B/16: small experts (513 M, stored in 32 and 16 bits) and Table 3's (2.3 B)."""
    measured = [
        scale.export_scale(128, 384),
        scale.export_scale(128, 384, "bfloat16"),
        scale.export_scale(8, 30720),
    ]
    file.write_text(scale.to_json(measured), encoding="utf-8")


def _calibration(file: Path) -> None:
    found = calibration.run(progress=_to_stderr)
    file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _calibration_tables(file: Path) -> str:
    found = json.loads(file.read_text(encoding="utf-8"))
    return f"{calibration.methods_table(found)}\n\n{calibration.tools_table(found)}"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


BENCHMARKS: Mapping[str, Benchmark] = {
    "layers": Benchmark(LAYERS, _layers, _layer_tables),
    "models": Benchmark(RESULTS / "models-cpu.json", _models, lambda f: model_table(read(f))),
    "mumoe": Benchmark(RESULTS / "mumoe-cpu.json", _mumoe, lambda f: mumoe_table(read(f))),
    "scale": Benchmark(
        RESULTS / "scale-cpu.json",
        _scale,
        lambda f: scale_table(scale.from_json(f.read_text(encoding="utf-8"))),
    ),
    "engine-scale": Benchmark(
        RESULTS / "engine-scale.json", engine_scale.measure, engine_scale.table
    ),
    "startup": Benchmark(RESULTS / "startup-cpu.json", startup.measure, startup.table),
    "calibration": Benchmark(RESULTS / "calibration-cpu.json", _calibration, _calibration_tables),
}


if __name__ == "__main__":
    main(sys.argv[1:])
