"""Large models: the time and memory of exporting them, and of building the engine of one.

What is measured runs in a process of its own, which measures itself: `python -m perf.scale`, with
the arguments of `moexport`, prints seconds and peak memory as its last line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from moexport.common.text import count, markdown, size
from moexport.exporter.tensorrt.backends import TENSORRT_RTX

from .record import keep, kept, peak_bytes

SAYS = "moexport: "
"""How the line begins that `moexport export` writes when a step does."""

START = "start"
"""What comes before the first step: Python and the imports."""

STEPS = ("loading", "tracing", "writing", "checking", "hashing")
"""The steps of a verified export, by the first word of what it says."""

SAID = ("--set", "num_heads=12", "--set", "rest=default")
EXPORT = ("--k", "0.25", "--precision", "fp16", "--target", "tensorrt-rtx", "--lowering", "gather")
BUILD = ("--compute-capability", "8.9", "--profile", "batch=1", "--engine-cache", "off")
"""How the engine is made."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What one export took: `seconds` in all, `steps` by the first word of what it said it did.

    `weights_bytes` are those of the FP32 weights that are written, whatever type the checkpoint has
    (`stored`). `peak_bytes` is the process's largest resident set, pages of mapped files included.
    """

    experts: int
    hidden: int
    parameters: int
    weights_bytes: int
    seconds: float
    steps: Mapping[str, float]
    peak_bytes: int
    stored: str = "float32"


def measure(file: Path) -> None:
    """Exports ViT-B/16: small experts (513 M, stored in 32 and 16 bits) and Table 3's (2.3 B)."""
    exports = [
        export_scale(128, 384),
        export_scale(128, 384, "bfloat16"),
        export_scale(8, 30720),
    ]
    keep(file, "scale", exports=[asdict(one) for one in exports])


def exports_in(file: Path) -> list[Scale]:
    """Returns the exports that were kept in a file."""
    return [Scale(**one) for one in kept(file)["exports"]]


def table(file: Path) -> str:
    """Returns the exports as Markdown."""
    header = (
        *("experts", "checkpoint", "parameters", "weights", "export", "load", "trace", "write"),
        *("check", "hash", "peak memory", "× the weights"),
    )
    return markdown(
        header,
        (
            (
                *(f"n={one.experts}, h={one.hidden}", one.stored, count(one.parameters)),
                *(size(one.weights_bytes), f"{one.seconds:.0f} s"),
                *(f"{one.steps[step]:.1f} s" for step in STEPS),
                *(size(one.peak_bytes), f"{one.peak_bytes / one.weights_bytes:.2f}"),
            )
            for one in exports_in(file)
        ),
    )


def export_scale(experts: int, hidden: int, stored: str = "float32") -> Scale:
    """Exports a ViT-B/16 with such experts through the command line and returns what it took."""
    with tempfile.TemporaryDirectory(prefix="moexport-scale-") as folder:
        checkpoint, bundle = Path(folder) / "vit.pt", Path(folder) / "bundle"
        parameters = vit_checkpoint(checkpoint, experts=experts, hidden=hidden, stored=stored)
        export = ("export", str(checkpoint), "-o", str(bundle), "--k", "0.25")
        command = [sys.executable, "-m", "perf.scale", *export, *SAID]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            steps = seconds_by_step(process.stderr)
            said = process.stdout.read()
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, said)
        return Scale(
            experts,
            hidden,
            parameters,
            4 * parameters,
            sum(steps.values()),
            steps,
            json.loads(said.splitlines()[-1])["peak_bytes"],
            stored,
        )


def seconds_by_step(lines: Iterable[str]) -> dict[str, float]:
    """Passes on what an export says, until it ends, and returns what each of its steps took."""
    steps: dict[str, float] = {}
    step, began = START, time.monotonic()
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        if line.startswith(SAYS):
            now = time.monotonic()
            steps[step] = now - began
            step, began = line.removeprefix(SAYS).split()[0], now
    steps[step] = time.monotonic() - began
    return steps


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


def measure_engine(file: Path) -> None:
    """Measures 8 experts of width 30,720 in six of twelve blocks (2.3 B parameters)."""
    if not TENSORRT_RTX.installed():
        print(f"{TENSORRT_RTX.title} is not installed: {TENSORRT_RTX.install}", file=sys.stderr)
        return
    engines = [asdict(engine_scale(8, 30720))]
    keep(file, "engine-scale", options={"export": EXPORT, "build": BUILD}, engines=engines)


def engine_table(file: Path) -> str:
    """Returns the engines as Markdown."""
    if not file.is_file():
        return f"no results: {TENSORRT_RTX.title} is not installed"
    return markdown(
        ("experts × hidden", "parameters", "export, peak", "build, peak", "engine"),
        (
            (
                f"{one.experts} × {one.hidden}",
                f"{one.parameters / 1e9:.2f} B",
                f"{one.export_s:.0f} s, {one.export_peak_bytes / 1e9:.1f} GB",
                f"{one.build_s:.0f} s, {one.build_peak_bytes / 1e9:.1f} GB",
                f"{one.plan_bytes / 1e9:.1f} GB",
            )
            for one in (EngineScale(**each) for each in kept(file)["engines"])
        ),
    )


def engine_scale(experts: int, hidden: int) -> EngineScale:
    """Exports a ViT-B/16 with such experts in FP16, compiles it and returns what both took."""
    with tempfile.TemporaryDirectory(prefix="moexport-engine-scale-") as folder:
        checkpoint, bundle = Path(folder) / "vit.pt", Path(folder) / "bundle"
        parameters = vit_checkpoint(checkpoint, experts=experts, hidden=hidden)
        exported = json.loads(
            _output(
                *("perf.scale", "export", str(checkpoint), "-o", str(bundle)),
                *(*SAID, *EXPORT, "--no-engine", "--no-verify"),
            ).splitlines()[-1]
        )
        checkpoint.unlink()
        (record,) = json.loads(_output("moexport", "build", str(bundle), *BUILD, "--json"))
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

    Its experts are modules of their own, or `stacked` in one tensor; `stored` is the weights' type.
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
