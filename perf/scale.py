"""Measures the time and memory of exporting large models, and of building an engine.

Each export runs in its own process, which measures itself: `python -m perf.scale`, with arguments
of `moexport`, prints seconds and peak memory in its last line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from moexport.common.console import Progress
from moexport.common.text import count, markdown, size
from moexport.exporter.tensorrt.backends import TENSORRT_RTX

from .measure import peak_bytes

PREFIX = "moexport: "
"""The start of each line that `moexport export` prints when a step begins."""

START = "start"
"""The time before the first step: Python's start and the imports."""

STEPS = ("loading", "tracing", "writing", "checking", "hashing")
"""The steps of a verified export, by the first word of their messages."""

SETTINGS = ("--set", "num_heads=12", "--set", "rest=default")
EXPORT = ("--k", "0.25", "--precision", "fp16", "--target", "tensorrt-rtx", "--lowering", "gather")
BUILD = ("--compute-capability", "8.9", "--profile", "batch=1", "--engine-cache", "off")
"""The options of the engine's export and build."""


def measure(progress: Progress) -> dict[str, object]:
    """Exports a ViT-B/16 with small experts (513 M, in 32 and 16 bits) and with Table 3's (2.3 B).

    Each export has its total `seconds` and the seconds of its `steps`. `weights_bytes` is the size
    of the written FP32 weights, whatever type the checkpoint has (`stored`). `peak_bytes` is the
    process's largest resident set, including pages of mapped files.
    """
    exports = []
    for experts, hidden, stored in (
        *((128, 384, "float32"), (128, 384, "bfloat16")),
        (8, 30720, "float32"),
    ):
        progress.step(f"a ViT-B/16 with n={experts}, h={hidden} in {stored}")
        with tempfile.TemporaryDirectory(prefix="moexport-scale-") as folder:
            checkpoint = Path(folder) / "vit.pt"
            parameters = vit_checkpoint(checkpoint, experts=experts, hidden=hidden, stored=stored)
            steps, itself = export(checkpoint, Path(folder) / "bundle", "--k", "0.25")
        exports.append(
            {
                "experts": experts,
                "hidden": hidden,
                "parameters": parameters,
                "weights_bytes": 4 * parameters,
                "seconds": sum(steps.values()),
                "steps": steps,
                "peak_bytes": itself["peak_bytes"],
                "stored": stored,
            }
        )
    return {"exports": exports}


def export(
    checkpoint: Path, bundle: Path, *options: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Exports with the command line; returns the seconds of its steps, and its own measurements."""
    command = [sys.executable, "-m", "perf.scale", "export", str(checkpoint), "-o", str(bundle)]
    command += [*SETTINGS, *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        steps = seconds_by_step(process.stderr)
        output = process.stdout.read()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    itself: dict[str, float] = json.loads(output.splitlines()[-1])
    return steps, itself


def seconds_by_step(lines: Iterable[str]) -> dict[str, float]:
    """Prints an export's messages until it ends; returns the seconds of each step."""
    steps: dict[str, float] = {}
    step, began = START, time.monotonic()
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        if line.startswith(PREFIX):
            now = time.monotonic()
            # A step repeats its name when it reports progress.
            steps[step] = steps.get(step, 0.0) + now - began
            step, began = line.removeprefix(PREFIX).split()[0], now
    steps[step] = steps.get(step, 0.0) + time.monotonic() - began
    return steps


def table(body: Any) -> str:
    """Returns the exports as Markdown."""
    header = (
        *("experts", "checkpoint", "parameters", "weights", "export", "load", "trace", "write"),
        *("check", "hash", "peak memory", "× the weights"),
    )
    rows = (
        (
            *(
                f"n={each['experts']}, h={each['hidden']}",
                each["stored"],
                count(each["parameters"]),
            ),
            *(size(each["weights_bytes"]), f"{each['seconds']:.0f} s"),
            *(f"{each['steps'][step]:.1f} s" for step in STEPS),
            *(size(each["peak_bytes"]), f"{each['peak_bytes'] / each['weights_bytes']:.2f}"),
        )
        for each in body["exports"]
    )
    return markdown(header, rows)


def measure_engine(progress: Progress) -> dict[str, object] | None:
    """Exports a model with 8 experts of width 30,720 in six blocks (2.3 B) in FP16 and compiles it.

    Peaks are the largest resident sets of the export and of the build.
    """
    if not TENSORRT_RTX.installed():
        progress.step(f"{TENSORRT_RTX.title} is not installed: {TENSORRT_RTX.install}")
        return None
    experts, hidden = 8, 30720
    with tempfile.TemporaryDirectory(prefix="moexport-engine-scale-") as folder:
        checkpoint, bundle = Path(folder) / "vit.pt", Path(folder) / "bundle"
        parameters = vit_checkpoint(checkpoint, experts=experts, hidden=hidden)
        _, exported = export(checkpoint, bundle, *EXPORT, "--no-engine", "--no-verify")
        checkpoint.unlink()
        build = [sys.executable, "-m", "moexport", "build", str(bundle), *BUILD, "--json"]
        (record,) = json.loads(subprocess.check_output(build, text=True))
        engine = {
            "experts": experts,
            "hidden": hidden,
            "parameters": parameters,
            "weights_bytes": (bundle / "weights.bin").stat().st_size,
            "export_s": exported["seconds"],
            "export_peak_bytes": exported["peak_bytes"],
            "build_s": record["seconds"],
            "build_peak_bytes": record["peak_memory_bytes"],
            "plan_bytes": (bundle / record["file"]).stat().st_size,
            "products": record["precision"],
        }
    return {"options": {"export": EXPORT, "build": BUILD}, "engines": [engine]}


def engine_table(body: Any) -> str:
    """Returns the engines as Markdown."""
    rows = (
        (
            f"{each['experts']} × {each['hidden']}",
            f"{each['parameters'] / 1e9:.2f} B",
            f"{each['export_s']:.0f} s, {each['export_peak_bytes'] / 1e9:.1f} GB",
            f"{each['build_s']:.0f} s, {each['build_peak_bytes'] / 1e9:.1f} GB",
            f"{each['plan_bytes'] / 1e9:.1f} GB",
        )
        for each in body["engines"]
    )
    return markdown(
        ("experts × hidden", "parameters", "export, peak", "build, peak", "engine"), rows
    )


def vit_checkpoint(
    path: Path,
    *,
    experts: int,
    hidden: int,
    dim: int = 768,
    depth: int = 12,
    moe_from: int = 6,
    stacked: bool = False,
    stored: str = "float32",
) -> int:
    """Writes a Soft MoE ViT-B/16 with random weights; returns its parameter count.

    Its experts are separate modules, or `stacked` in one tensor; `stored` is the weights' type.
    """
    random = torch.Generator().manual_seed(0)
    dtype = getattr(torch, stored)

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=random) * 0.02).to(dtype)

    state = {"cls_token": draw(1, 1, dim), "pos_embed": draw(1, 197, dim)}

    def linear(name: str, *shape: int) -> None:
        state[f"{name}.weight"] = draw(*shape)
        state[f"{name}.bias"] = draw(shape[0])

    def norm(name: str) -> None:
        state[f"{name}.weight"] = torch.ones(dim)
        state[f"{name}.bias"] = torch.zeros(dim)

    linear("patch_embed.proj", dim, 3, 16, 16)
    norm("norm")
    linear("head", 1000, dim)
    for index in range(depth):
        block = f"blocks.{index}"
        norm(f"{block}.norm1")
        norm(f"{block}.norm2")
        linear(f"{block}.attn.qkv", 3 * dim, dim)
        linear(f"{block}.attn.proj", dim, dim)
        if index < moe_from:
            sizes = {"": 4 * dim}
        else:
            state[f"{block}.mlp.phi"] = draw(dim, experts, 1)
            state[f"{block}.mlp.scale"] = torch.tensor([10.0])
            if stacked:
                first, second = (experts, hidden, dim), (experts, dim, hidden)
                for name, shape in (("fc1", first), ("fc2", second)):
                    state[f"{block}.mlp.stacked_expert_{name}_weight"] = draw(*shape)
                    state[f"{block}.mlp.stacked_expert_{name}_bias"] = draw(*shape[:2])
                continue
            sizes = {f"experts.{e}.": hidden for e in range(experts)}
        for expert, width in sizes.items():
            linear(f"{block}.mlp.{expert}fc1", width, dim)
            linear(f"{block}.mlp.{expert}fc2", dim, width)
    torch.save(state, path)
    return sum(tensor.numel() for tensor in state.values())


if __name__ == "__main__":
    began = time.monotonic()
    from moexport.cli import app

    app(sys.argv[1:], standalone_mode=False)
    print(json.dumps({"seconds": time.monotonic() - began, "peak_bytes": peak_bytes()}))
