"""`python -m benchmarks [NAME…]`: measures, prints tables, keeps results as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moexport.bench.results import read, write

from . import calibration, fit, layers, models, mumoe, scale
from .tables import (
    integer_table,
    integer_targets_table,
    layer_table,
    model_table,
    mumoe_table,
    scale_table,
    targets_table,
)

NAMES = ("layers", "models", "mumoe", "scale", "calibration")
RESULTS = Path(__file__).parent / "results"
MUMOE = RESULTS / "mumoe-cpu.json"
MODELS = RESULTS / "models-cpu.json"
CALIBRATION = RESULTS / "calibration-cpu.json"


def main(arguments: list[str]) -> None:
    """Runs the named benchmarks, all without a name.

    `tables` prints what was kept, `fit` what it says of the cost model.
    """
    wanted = arguments or list(NAMES)
    unknown = set(wanted) - {*NAMES, "tables", "fit"}
    if unknown:
        known = ", ".join(NAMES)
        sys.exit(f"error: no benchmark {', '.join(sorted(unknown))}: use {known}, tables or fit")
    kept = RESULTS / "layers-cpu.json"
    if "layers" in wanted:
        for so_far in layers.run(progress=_to_stderr):
            write(so_far, kept)
    if "layers" in wanted or "tables" in wanted:
        results = read(kept)
        tables = (targets_table, layer_table, integer_targets_table, integer_table)
        print(*(table(results) for table in tables), sep="\n\n")
    if "fit" in wanted:
        print(fit.report(read(kept)))
    if "models" in wanted:
        write(models.run(progress=_to_stderr), MODELS)
    if "models" in wanted or "tables" in wanted:
        print(model_table(read(MODELS)))
    if "mumoe" in wanted:
        write(mumoe.run(progress=_to_stderr), MUMOE)
    if "mumoe" in wanted or "tables" in wanted:
        print(mumoe_table(read(MUMOE)))
    if "scale" in wanted:
        _scale()
    if "calibration" in wanted:
        found = calibration.run(progress=_to_stderr)
        CALIBRATION.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if CALIBRATION.exists() and ("calibration" in wanted or "tables" in wanted):
        found = json.loads(CALIBRATION.read_text(encoding="utf-8"))
        print(calibration.methods_table(found), calibration.tools_table(found), sep="\n\n")


def _scale() -> None:
    """Exports ViT-B/16 with small experts (513 M parameters) and with Table 3's (2.3 B)."""
    measured = [scale.export_scale(128, 384), scale.export_scale(8, 30720)]
    (RESULTS / "scale-cpu.json").write_text(scale.to_json(measured), encoding="utf-8")
    print(scale_table(measured))


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
