"""Compiles every family, lowering and precision that TensorRT-RTX supports, and records sizes.

`python -m perf.rtx_builds -o FILE` needs no GPU. The models are the recorded cases of the tests,
which are so small that the sizes show what an engine adds to its weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import moexport
from moexport.common.writing import write_text
from moexport.errors import MoexportError
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.records import engines_of
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.targets import Precision
from moexport.tests.recorded import DATA, RecordedCase, read_case

OPSETS = {"int4": 21}


@dataclass(frozen=True, slots=True)
class Build:
    """One engine: its build time and its size, or why it was refused."""

    case: str
    lowering: str
    precision: Precision
    seconds: float | None = None
    nbytes: int | None = None
    refused: str | None = None


def cases() -> Iterator[RecordedCase]:
    """Yields the recorded cases, one for each published implementation."""
    for folder in sorted(DATA.iterdir()):
        if (folder / "weights.pt").is_file():
            yield read_case(folder.name)


def builds(case: RecordedCase, place: Path) -> Iterator[Build]:
    """Yields every lowering and precision of a case, compiled or refused."""
    model = moexport.load(case.weights, config=case.config)
    specs = [layer.spec for layer in model.layers.values()]
    for lowering, record in lowerings_of(specs[0].kind).items():
        for precision in get_args(Precision):
            if not any(record.problem(spec, precision, "tensorrt-rtx") for spec in specs):
                yield _built(model, case, Build(case.name, lowering, precision), place)


def _built(model: moexport.Model, case: RecordedCase, build: Build, place: Path) -> Build:
    try:
        bundle = moexport.export(
            model,
            place / "out",
            k=min(case.ks),
            target="tensorrt-rtx",
            lowering=build.lowering,
            precision=build.precision,
            opset=OPSETS.get(build.precision, 20),
            data=case.x if build.precision in ("int8", "fp8") else None,
            verify=False,
            force=True,
            engine=EngineOptions(),
        )
    except MoexportError as error:
        return replace(build, refused=error.message)
    (record,) = engines_of(bundle.manifest)
    size = (bundle.path / record.file).stat().st_size
    return replace(build, seconds=record.seconds, nbytes=size)


def main() -> None:
    """Writes the results after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("rtx-builds.json"))
    parser.add_argument("cases", nargs="*", help="recorded cases [default: all]")
    asked = parser.parse_args()
    found: list[Build] = []
    for case in cases():
        if asked.cases and case.name not in asked.cases:
            continue
        with tempfile.TemporaryDirectory() as place:
            found += builds(case, Path(place))
        compiled = [each for each in found if each.refused is None]
        print(f"{case.name}: {len(compiled)} of {len(found)} so far", flush=True)
        write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", asked.output)


if __name__ == "__main__":
    main()
