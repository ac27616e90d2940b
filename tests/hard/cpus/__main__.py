"""What other CPUs compute: `python -m moexport.tests.hard.cpus`; docs/deploy.md has it as a table.

Bundles of recorded networks and of `networks` are exported here and run on emulated CPUs; what
each gives is compared with PyTorch and with this machine. `--place FOLDER` keeps the emulation
and the bundles for the next time.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from moexport.common.environment import cpu_features, versions
from moexport.common.writing import write_text
from moexport.exporter.bundle.parity import PARITY_FILE, Reference
from moexport.tests.command import run
from moexport.tests.hard.cpus import networks
from moexport.tests.hard.cpus.emulated import CPUS, ROOT, Machine, missing
from moexport.tests.recorded import ENTMAX, VIT_SETS, read_case

RESULTS = ROOT / "perf" / "results" / "cpus.json"
HERE = "this machine"

NETWORKS = ("long", "cancelling", "large")
CASES = ("soft_moe_vit", "soft_moe_conv", "soft_moe_lucidrains", "mumoe_cp", "mumoe_mixer_tr")
LANGUAGE = "mumoe_gpt2_cp"
PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "FP32": (),
    "FP16": ("--precision", "fp16"),
    "INT8, 7-bit weights": ("--precision", "int8"),
    "INT8, 8-bit weights": ("--precision", "int8", "--weight-bits", "8"),
    "INT4": ("--precision", "int4", "--quantize", "all"),
}
TARGETS = ("onnx", "ort-cpu")


def exported(place: Path, precision: str) -> Iterator[Path]:
    """Exports each network in a precision; yields the bundles there are."""
    floats = precision in ("FP32", "FP16")
    for name in (*NETWORKS, *CASES, *((LANGUAGE,) if floats else ())):
        for target in TARGETS if name in NETWORKS else TARGETS[1:]:
            folder = place / "-".join((name, target, precision.replace(" ", "_")))
            if folder.is_dir() or _export(name, folder, target, PRECISIONS[precision]):
                yield folder


def _export(name: str, folder: Path, target: str, options: tuple[str, ...]) -> bool:
    if name in NETWORKS:
        source: tuple[str | Path, ...] = (f"moexport.tests.hard.cpus.networks:{name}", "--k", "4")
        x = getattr(networks, name)().example_input.numpy()
    else:
        case = read_case(name)
        sets = [f"{key}={json.dumps(value)}" for key, value in case.config.items()]
        if name == "soft_moe_vit":
            sets = [each for each in VIT_SETS if each != "--set"]
        elif case.family == "mumoe":
            sets = [each for each in ENTMAX if each != "--set"]
        words = [word for each in sets for word in ("--set", each)]
        source, x = (case.weights, *words), case.x
    if "int8" in options:
        np.savez(folder.with_suffix(".npz"), input=x)
        options = (*options, "--data", str(folder.with_suffix(".npz")))
    done = run("export", *source, "-o", folder, "--target", target, *options, "--force")
    if done.code:
        print(f"{folder.name}: {done.err.strip().splitlines()[-2:]}", file=sys.stderr)
    return done.code == 0


def off(y: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the largest difference over max|wanted|; infinite where a number is none."""
    if not np.isfinite(y).all():
        return float("inf")
    return float(np.abs(y - wanted.astype(np.float64)).max() / np.abs(wanted).max())


def answers(machine: Machine, cpu: str, folders: list[Path], out: Path) -> dict[str, np.ndarray]:
    """Returns what every bundle gives on a CPU."""
    program = Path(__file__).with_name("answers.py")
    arguments = (program, out, *folders)
    if cpu == HERE:
        from moexport.tests.hard.cpus.answers import main as here

        here(out, folders)
    else:
        done = machine.run(CPUS[cpu], *arguments, path=[_package(machine.folder)])
        if done.returncode:
            raise RuntimeError(f"{cpu}: {done.stderr[-400:]}")
    with np.load(out) as arrays:
        return dict(arrays.items())


def _package(place: Path) -> Path:
    """A folder in which the checkout is found as `moexport`."""
    link = place / "source" / "moexport"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(ROOT)
    return link.parent


Answers = Mapping[str, Mapping[str, np.ndarray]]
"""What each bundle gives, by CPU and by the bundle's name."""


def row(precision: str, folders: list[Path], found: Answers) -> dict[str, Any]:
    """What came of a precision: by CPU how far it is from PyTorch, over what it is here."""
    wanted = {each.name: Reference.load(each / PARITY_FILE).y for each in folders}
    errors = {name: off(found[HERE][name], y) for name, y in wanted.items()}
    by_cpu = {}
    for cpu, given in found.items():
        ran = {name: given[name] for name in wanted if name in given}
        times = {n: off(y, wanted[n]) / max(errors[n], FP32_ERROR) for n, y in ran.items()}
        worst = max(times, key=lambda name: times[name])
        by_cpu[cpu] = {
            "ran": len(ran),
            "from_here": max(off(y, found[HERE][name]) for name, y in ran.items()),
            "times": times[worst],
            "worst": worst,
        }
    del by_cpu[HERE]
    return {
        "precision": precision,
        "bundles": len(folders),
        "error": max(errors.values()),
        "cpus": by_cpu,
    }


FP32_ERROR = 1e-5
"""An error that sums in another order may make of none, of max|y|: what cancels loses some bits."""


def main() -> None:
    """Measures what was asked for and keeps it; exit 1 where FP16 is further off than here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, help="the folder in which all of it stays")
    parser.add_argument("--only", choices=PRECISIONS, action="append", help="a precision")
    asked = parser.parse_args()
    cpus = [name for name, cpu in CPUS.items() if missing(cpu) is None]
    if not cpus:
        sys.exit(missing(CPUS["cortex-a76"]))
    with tempfile.TemporaryDirectory(prefix="moexport-cpus-") as scratch:
        place = asked.place or Path(scratch)
        bundles = place / "bundles"
        bundles.mkdir(parents=True, exist_ok=True)
        machine = Machine(place).prepared()
        made = {name: list(exported(bundles, name)) for name in asked.only or PRECISIONS}
        every = [folder for folders in made.values() for folder in folders]
        print(f"{len(every)} bundles on {', '.join(cpus)}", file=sys.stderr, flush=True)
        found = {HERE: answers(machine, HERE, every, place / "here.npz")}
        with ThreadPoolExecutor(len(cpus)) as pool:  # each is a process of one thread
            given = pool.map(lambda cpu: answers(machine, cpu, every, place / f"{cpu}.npz"), cpus)
            found |= dict(zip(cpus, given, strict=True))
        rows = [row(name, folders, found) for name, folders in made.items()]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "here": cpu_features(),
        "system": platform.system(),
        "packages": versions(("onnxruntime", "numpy")),
        "rows": rows,
    }
    print(json.dumps(record, indent=1))
    if asked.only is None:
        write_text(json.dumps(record, indent=1) + "\n", RESULTS)
    fp16 = [cpu for each in rows if each["precision"] == "FP16" for cpu in each["cpus"].values()]
    sys.exit(any(cpu["times"] > 1.5 for cpu in fp16))


if __name__ == "__main__":
    main()
