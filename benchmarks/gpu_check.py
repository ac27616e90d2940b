"""What only a GPU can show: engines built, run, compared and timed. `make gpu-check` runs it.

For each flavour, precision and lowering that the machine has: the engine's outputs against the
PyTorch reference of its bundle, and its time for every k. What is left out is listed with the
reason, so that the results of a machine say what they are not about.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import moexport
import numpy as np
from moexport.errors import MoexportError
from moexport.exporter.engines.additions import engines_of
from moexport.exporter.engines.check import engine_parity
from moexport.exporter.engines.device import first_gpu
from moexport.exporter.engines.flavours import FLAVOURS
from moexport.exporter.engines.options import EngineOptions
from moexport.exporter.engines.session import EngineSession
from moexport.exporter.environment import environment
from moexport.exporter.parity import PARITY_FILE, Reference

from .scale import vit_checkpoint

LOWERINGS = ("dense", "gather", "conditional")
ROUNDS, RUNS = 5, 20
RTOL = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 5e-2, "int8": 1e-1}


@dataclass(frozen=True, slots=True)
class Checked:
    """One engine: how far it is from PyTorch, and its GPU time for each k, in milliseconds.

    `k_ms` has the median and the spread of the rounds' medians (largest less smallest).
    """

    flavour: str
    precision: str
    lowering: str
    built: dict[str, int]
    seconds: float
    max_rel: float
    cosine: float
    passed: bool
    k_ms: dict[int, tuple[float, float]]


def gpu_ms(session: EngineSession, x: np.ndarray, k: int) -> tuple[float, float]:
    """Returns the median GPU time of a run and the spread between rounds."""
    for _ in range(3):
        session.run(x, k)
    rounds = [float(np.median([session.gpu_ms(x, k) for _ in range(RUNS)])) for _ in range(ROUNDS)]
    return float(np.median(rounds)), max(rounds) - min(rounds)


def check_all(folder: Path, *, experts: int, hidden: int) -> Iterator[Checked | str]:
    """Yields what was checked, and a sentence for everything that was left out."""
    checkpoint = folder / "vit.pt"
    vit_checkpoint(checkpoint, experts=experts, hidden=hidden)
    model = moexport.load(checkpoint, config={"num_heads": 12})
    for flavour in FLAVOURS.values():
        if not flavour.installed():
            yield f"{flavour.title}: not installed: {flavour.install}"
            continue
        for precision in RTOL:
            try:
                bundle = moexport.export(
                    model,
                    folder / f"{flavour.name}-{precision}",
                    k="input",
                    target=flavour.name,  # type: ignore[arg-type]  # both are targets
                    lowering=",".join(LOWERINGS),
                    engine=False,
                    **_precision(precision),
                )
                bundle = moexport.build(bundle, options=_options(flavour.builds_without_gpu))
            except (MoexportError, TypeError) as error:
                yield f"{flavour.title}, {precision}: {error}"
                continue
            yield from _checked(bundle, precision, experts)


def _precision(name: str) -> dict[str, Any]:
    return {} if name == "fp32" else {"precision": name}


def _options(portable: bool) -> EngineOptions:
    return EngineOptions(compute_capabilities=("current",) if portable else ())


def _checked(bundle: moexport.Bundle, precision: str, experts: int) -> Iterator[Checked | str]:
    expected = Reference.load(bundle.path / PARITY_FILE)
    graphs = {graph.file: graph for graph in bundle.manifest.graphs}
    for record in engines_of(bundle.manifest):
        lowering = "+".join(sorted(set(graphs[record.graph].lowerings.values())))
        try:
            parity = engine_parity(
                bundle.path, bundle.manifest, record, expected, rtol=RTOL[precision]
            )
            with EngineSession(bundle.path / record.file) as session:
                ks = [k for k in (experts, experts // 2, experts // 4, experts // 8) if k]
                times = {k: gpu_ms(session, expected.x[:1], k) for k in ks}
        except MoexportError as error:
            yield f"{record.file}, {precision}: {error.message}"
            continue
        yield Checked(
            flavour=record.flavour,
            precision=precision,
            lowering=lowering,
            built=record.precision,
            seconds=record.seconds,
            max_rel=parity.max_rel,
            cosine=parity.cosine,
            passed=parity.passed,
            k_ms=times,
        )


def main() -> None:
    """Runs the checks and writes their results; exit 1 when one failed, or without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=768)
    asked = parser.parse_args()
    if first_gpu() is None:
        sys.exit("error: there is no NVIDIA GPU here\nhint: `moexport doctor` says what is")
    done: list[Checked] = []
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="moexport-gpu-check-") as folder:
        for each in check_all(Path(folder), experts=asked.experts, hidden=asked.hidden):
            print(each, flush=True)
            if isinstance(each, Checked):
                done.append(each)
            else:
                left_out.append(each)
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "make gpu-check",
        "environment": environment(),
        "engines": [asdict(each) for each in done],
        "left_out": left_out,
    }
    asked.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if not done or not all(each.passed for each in done):
        sys.exit(f"error: a check failed; {asked.output} has what was found")


if __name__ == "__main__":
    main()
