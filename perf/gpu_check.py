"""What only a GPU can show: engines built, run, compared and timed. `make gpu-check` runs it.

For each backend, precision and lowering that the machine has: the engine's outputs against the
PyTorch reference of its bundle, and its time for every k, on the GPU and from array to array; the
same for ONNX Runtime's providers. Each of these is a process of its own, and the results are
written after each, so that a crash costs one of them. What is left out is listed with the reason
and what failed with its message and traceback: the results of a machine say what they are not
about.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import moexport
import numpy as np
from moexport.common.environment import environment
from moexport.common.writing import write_text
from moexport.errors import MoexportError
from moexport.exporter.tensorrt.backends import BACKENDS, TENSORRT, Backend, Gpu, first_gpu
from moexport.graphs.precision.types import Precision
from moexport.graphs.targets import Target

from .gpu_unit import ROUNDS, RUNS, SAMPLES, WARM_UPS, Trouble, Unit
from .scale import vit_checkpoint

LOWERINGS = ("dense", "gather", "conditional")
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
PROVIDERS: Mapping[str, Target] = {"onnxruntime-cuda": "ort-cuda", "onnxruntime-tensorrt": "onnx"}
PROVIDER_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
UNIT = (sys.executable, "-m", f"{__package__}.gpu_unit")
MOST_S = 900.0
"""How long one unit may take."""

Row = Mapping[str, Any]
"""A `Checked` or a `Trouble` as JSON has it."""


def rows(folder: Path, size: argparse.Namespace, gpu: Gpu | None) -> Iterator[Row]:
    """Yields what was checked and what was left out, one after another."""
    checkpoint = folder / "vit.pt"
    vit_checkpoint(
        checkpoint,
        experts=size.experts,
        hidden=size.hidden,
        dim=size.dim,
        depth=size.depth,
        moe_from=size.depth // 2,
    )
    model = moexport.load(checkpoint, config={"num_heads": 12})
    x = np.random.default_rng(0).standard_normal((SAMPLES, 3, 224, 224), np.float32)
    ks = [k for k in (size.experts // part for part in (1, 2, 4, 8)) if k]
    for runner, target in [(name, cast(Target, name)) for name in BACKENDS] + [*PROVIDERS.items()]:
        why = absent(runner, gpu)
        if why is not None:
            yield asdict(Trouble(runner, why, failure=False))
            continue
        engine = runner in BACKENDS
        for precision in PRECISIONS if engine else PROVIDER_PRECISIONS:

            def exported(
                runner: str = runner,
                target: Target = target,
                precision: Precision = precision,
                lowerings: Sequence[str] = LOWERINGS if engine else ("gather",),
            ) -> Iterator[Row]:
                place = folder / f"{runner}-{precision}"
                bundle = moexport.export(
                    model,
                    place,
                    k="input",
                    target=target,
                    lowering=",".join(lowerings),
                    precision=precision,
                    data=x,
                    engine=False,
                )
                for graph in bundle.manifest.graphs:
                    lowering = "+".join(sorted(set(graph.lowerings.values())))
                    unit = Unit(runner, precision, lowering, str(place), graph.file, ks)
                    yield outcome(unit.name, UNIT, json.dumps(asdict(unit)))

            yield from guarded(f"{runner}, {precision}", exported)


def absent(runner: str, gpu: Gpu | None) -> str | None:
    """Returns why a runner is left out: it is not here, or does not serve this GPU."""
    backend: Backend | None = BACKENDS.get(runner)
    if backend is None and runner == "onnxruntime-tensorrt" and not TENSORRT.installed():
        return f"it needs TensorRT, which is not installed: {TENSORRT.install}"
    if backend is None:
        return None
    if not backend.installed():
        return f"not installed: {backend.install}"
    if gpu is not None and not backend.serves(gpu.compute_capability):
        return f"it serves {backend.served}, and {gpu.name} is {gpu.compute_capability}"
    return None


def guarded(what: str, work: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yields what a check finds; what goes wrong ends it, and not the checks after it."""
    try:
        yield from work()
    except MoexportError as error:
        yield asdict(
            Trouble(what, "; ".join(filter(None, (error.message, error.hint))), failure=True)
        )
    except Exception as error:  # noqa: BLE001  a defect must not cost what else there is to find
        why = f"{type(error).__name__}: {error}"
        yield asdict(Trouble(what, why, failure=True, traceback=traceback.format_exc()))


def outcome(what: str, command: Sequence[str], request: str, most_s: float = MOST_S) -> Row:
    """Runs a unit in a process of its own and returns its answer, or how it ended without one."""
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=most_s, check=False
        )
    except subprocess.TimeoutExpired:
        return asdict(Trouble(what, f"it took longer than {most_s:.0f} s", failure=True))
    said = done.stdout.splitlines()[-1:]
    if done.returncode == 0 and said:
        answer: Row = json.loads(said[0])
        return answer
    end = "\n".join(done.stderr.splitlines()[-20:])
    why = f"its process ended with status {done.returncode}"
    return asdict(Trouble(what, why, failure=True, traceback=end or None))


def run(output: Path, size: argparse.Namespace, gpu: Gpu | None) -> bool:
    """Runs all checks, writes the results after each, and returns whether all is well."""
    found: list[Row] = []
    _write(output, size, gpu, found, complete=False)
    with tempfile.TemporaryDirectory(prefix="moexport-gpu-check-") as folder:
        for row in rows(Path(folder), size, gpu):
            found.append(row)
            print(_line(row), file=sys.stderr, flush=True)
            _write(output, size, gpu, found, complete=False)
    _write(output, size, gpu, found, complete=True)
    checked = [row["passed"] for row in found if "passed" in row]
    return bool(checked) and all(checked) and not any(row.get("failure") for row in found)


def _line(row: Row) -> str:
    if "passed" not in row:
        return f"{'FAILED' if row['failure'] else 'left out'} {row['what']}: {row['why']}"
    name = f"{row['runner']}, {row['precision']}, {row['lowering']}"
    verdict = "passed" if row["passed"] else "FAILED"
    times = ", ".join(
        f"k={each['k']} batch={each['batch']} "
        f"{(each['gpu'] or each['end_to_end'])['median_ms']:.3g} ms"
        for each in row["times"]
    )
    return f"{verdict} {name}: {row['max_rel']:.2g} of max|y| off; {times}"


def _write(
    output: Path, size: argparse.Namespace, gpu: Gpu | None, found: Sequence[Row], *, complete: bool
) -> None:
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "make gpu-check",
        "complete": complete,
        "model": {name: getattr(size, name) for name in ("dim", "experts", "hidden", "depth")},
        "protocol": {"warm_ups": WARM_UPS, "runs": RUNS, "rounds": ROUNDS},
        "environment": environment() | {"first_gpu": None if gpu is None else asdict(gpu)},
        "checked": [row for row in found if "passed" in row],
        "failed": [row for row in found if row.get("failure")],
        "left_out": [row for row in found if row.get("failure") is False],
    }
    write_text(json.dumps(content, indent=1) + "\n", output)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("-o", "--output", type=Path, default=Path("gpu-check.json"))
    found.add_argument("--dim", type=int, default=768, help="a multiple of 12, the heads")
    found.add_argument("--experts", type=int, default=32)
    found.add_argument("--hidden", type=int, default=768)
    found.add_argument("--depth", type=int, default=4, help="blocks; the second half are MoE")
    return found


def main() -> None:
    """Runs the checks and writes their results; exit 1 when one failed, or without a GPU."""
    asked = parser().parse_args()
    gpu = first_gpu()
    if gpu is None:
        sys.exit("error: there is no NVIDIA GPU here\nhint: `moexport doctor` says what is")
    if not run(asked.output, asked, gpu):
        sys.exit(f"error: a check failed; {asked.output} has what was found")
    print(asked.output)


if __name__ == "__main__":
    main()
