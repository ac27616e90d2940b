"""The memory that building the engine of a large model takes, each step in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moexport.common.environment import environment
from moexport.exporter.tensorrt.backends import TENSORRT_RTX

from .scale import vit_checkpoint

COMMAND = "python -m perf engine-scale"
EXPORT = ("--k", "0.25", "--precision", "fp16", "--target", "tensorrt-rtx", "--lowering", "gather")
BUILD = ("--compute-capability", "8.9", "--profile", "batch=1", "--engine-cache", "off")


@dataclass(frozen=True, slots=True)
class EngineScale:
    """What one engine took. The peaks are the largest resident sets of export and build."""

    experts: int
    hidden: int
    parameters: int
    weights_bytes: int
    export_s: float
    export_peak_bytes: int
    build_s: float
    build_peak_bytes: int
    plan_bytes: int
    products: dict[str, int]


def engine_scale(experts: int, hidden: int) -> EngineScale:
    """Exports a ViT-B/16 with such experts in FP16, compiles it and returns what both took."""
    with tempfile.TemporaryDirectory(prefix="moexport-engine-scale-") as folder:
        checkpoint, bundle = Path(folder) / "vit.pt", Path(folder) / "bundle"
        parameters = vit_checkpoint(checkpoint, experts=experts, hidden=hidden)
        exported = _last_line(
            "perf.scale",
            *("export", str(checkpoint), "-o", str(bundle), "--set", "num_heads=12"),
            *(*EXPORT, "--no-engine", "--no-verify"),
        )
        checkpoint.unlink()
        (record,) = _json("moexport", "build", str(bundle), *BUILD, "--json")
        return EngineScale(
            experts,
            hidden,
            parameters,
            (bundle / "weights.bin").stat().st_size,
            exported["seconds"],
            exported["peak_bytes"],
            record["seconds"],
            record["peak_memory_bytes"],
            (bundle / record["file"]).stat().st_size,
            record["precision"],
        )


def _output(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *command], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _json(*command: str) -> Any:
    return json.loads(_output(*command))


def _last_line(*command: str) -> Any:
    return json.loads(_output(*command).splitlines()[-1])


def measure(file: Path) -> None:
    """Measures 8 experts of width 30,720 in six of twelve blocks (2.3 B parameters)."""
    if not TENSORRT_RTX.installed():
        print(f"{TENSORRT_RTX.title} is not installed: {TENSORRT_RTX.install}", file=sys.stderr)
        return
    body = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": COMMAND,
        "options": {"export": EXPORT, "build": BUILD},
        "environment": environment(),
        "engines": [asdict(engine_scale(8, 30720))],
    }
    file.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def table(file: Path) -> str:
    """The results as a table in Markdown."""
    if not file.is_file():
        return f"no results: {TENSORRT_RTX.title} is not installed"
    rows = [
        "| experts × hidden | parameters | export, peak | build, peak | engine |",
        "|---|---|---|---|---|",
    ]
    for each in json.loads(file.read_text(encoding="utf-8"))["engines"]:
        one = EngineScale(**each)
        rows.append(
            f"| {one.experts} × {one.hidden} | {one.parameters / 1e9:.2f} B "
            f"| {one.export_s:.0f} s, {one.export_peak_bytes / 1e9:.1f} GB "
            f"| {one.build_s:.0f} s, {one.build_peak_bytes / 1e9:.1f} GB "
            f"| {one.plan_bytes / 1e9:.1f} GB |"
        )
    return "\n".join(rows)
