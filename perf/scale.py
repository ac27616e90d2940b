"""Exports of large models in a process of their own: seconds by step, and peak memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from moexport.common.environment import environment

SAYS = "moexport: "
"""How the line begins that `moexport export` writes when a step does."""

START = "start"
"""What comes before the first step: Python and the imports."""


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

    state = {
        "cls_token": draw(1, 1, dim),
        "pos_embed": draw(1, 197, dim),
        "patch_embed.proj.weight": draw(dim, 3, 16, 16),
        "patch_embed.proj.bias": draw(dim),
        "norm.weight": torch.ones(dim),
        "norm.bias": torch.zeros(dim),
        "head.weight": draw(1000, dim),
        "head.bias": draw(1000),
    }
    for block in range(depth):
        prefix = f"blocks.{block}"
        for norm in ("norm1", "norm2"):
            state[f"{prefix}.{norm}.weight"] = torch.ones(dim)
            state[f"{prefix}.{norm}.bias"] = torch.zeros(dim)
        state[f"{prefix}.attn.qkv.weight"] = draw(3 * dim, dim)
        state[f"{prefix}.attn.qkv.bias"] = draw(3 * dim)
        state[f"{prefix}.attn.proj.weight"] = draw(dim, dim)
        state[f"{prefix}.attn.proj.bias"] = draw(dim)
        if block < moe_from:
            sizes = {"": 4 * dim}
        else:
            state[f"{prefix}.mlp.phi"] = draw(dim, experts, 1)
            state[f"{prefix}.mlp.scale"] = torch.tensor([10.0])
            if stacked:
                first, second = (experts, hidden, dim), (experts, dim, hidden)
                for name, shape in (("fc1", first), ("fc2", second)):
                    state[f"{prefix}.mlp.stacked_expert_{name}_weight"] = draw(*shape)
                    state[f"{prefix}.mlp.stacked_expert_{name}_bias"] = draw(*shape[:2])
                continue
            sizes = {f"experts.{e}.": hidden for e in range(experts)}
        for expert, width in sizes.items():
            state[f"{prefix}.mlp.{expert}fc1.weight"] = draw(width, dim)
            state[f"{prefix}.mlp.{expert}fc1.bias"] = draw(width)
            state[f"{prefix}.mlp.{expert}fc2.weight"] = draw(dim, width)
            state[f"{prefix}.mlp.{expert}fc2.bias"] = draw(dim)
    torch.save(state, path)
    return sum(tensor.numel() for tensor in state.values())


def export_scale(experts: int, hidden: int, stored: str = "float32") -> Scale:
    """Exports a ViT-B/16 with such experts through the command line and returns what it took."""
    with tempfile.TemporaryDirectory(prefix="moexport-scale-") as folder:
        checkpoint = Path(folder) / "vit.pt"
        parameters = vit_checkpoint(checkpoint, experts=experts, hidden=hidden, stored=stored)
        command = [
            "export",
            str(checkpoint),
            "-o",
            str(Path(folder) / "bundle"),
            "--k",
            "0.25",
            "--set",
            "num_heads=12",
        ]
        with subprocess.Popen(
            [sys.executable, "-m", "perf.scale", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as export:
            assert export.stdout is not None
            assert export.stderr is not None
            steps = seconds_by_step(export.stderr)
            said = export.stdout.read()
        if export.returncode != 0:
            raise subprocess.CalledProcessError(export.returncode, command, said)
        report = json.loads(said.splitlines()[-1])
        return Scale(
            experts,
            hidden,
            parameters,
            4 * parameters,
            sum(steps.values()),
            steps,
            report["peak_bytes"],
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


def _measured_main(arguments: list[str]) -> None:
    """Exports, and says what it took; a process measures itself."""
    started = time.monotonic()
    from moexport.cli import app

    app(arguments, standalone_mode=False)
    seconds = time.monotonic() - started
    # Not getrusage: what a process is started from counts into its largest resident set there.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert peak is not None
    print(json.dumps({"seconds": seconds, "peak_bytes": 1024 * int(peak[1])}))


def to_json(scales: list[Scale]) -> str:
    """The measurements and the machine they were made on, as JSON."""
    body = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m perf scale",
        "environment": environment(),
        "exports": [asdict(scale) for scale in scales],
    }
    return json.dumps(body, indent=1) + "\n"


def from_json(text: str) -> list[Scale]:
    """The measurements in a text that `to_json` wrote."""
    return [Scale(**one) for one in json.loads(text)["exports"]]


def measured_on(text: str) -> str:
    """The day and the machine that a text of `to_json` names: processor, cores and memory."""
    body: Mapping[str, Any] = json.loads(text)
    facts = body["environment"]
    return (
        f"{body['created'][:10]}: {facts['cpu']['model']}, {facts['cpu']['cores']} cores, "
        f"{facts['memory_bytes'] / 1e9:.0f} GB of memory"
    )


if __name__ == "__main__":
    _measured_main(sys.argv[1:])
