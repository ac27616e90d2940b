"""Exports of large models in a process of their own: seconds and peak memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from moexport.exporter.environment import environment


@dataclass(frozen=True, slots=True)
class Scale:
    """What one export took. `peak_bytes` is the process's largest resident set."""

    experts: int
    hidden: int
    parameters: int
    weights_bytes: int
    seconds: float
    peak_bytes: int
    verified: bool


def vit_checkpoint(
    path: Path,
    *,
    experts: int,
    hidden: int,
    dim: int = 768,
    depth: int = 12,
    moe_from: int = 6,
    stacked: bool = False,
) -> int:
    """Writes a Soft MoE ViT-B/16 with random weights; returns its parameter count.

    Its experts are modules of their own, or `stacked` in one tensor.
    """
    random = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random) * 0.02

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


def export_scale(experts: int, hidden: int, *, kept: str = "0.25", verify: bool = True) -> Scale:
    """Exports a ViT-B/16 with such experts through the command line and returns what it took."""
    with tempfile.TemporaryDirectory(prefix="moexport-scale-") as folder:
        checkpoint = Path(folder) / "vit.pt"
        parameters = vit_checkpoint(checkpoint, experts=experts, hidden=hidden)
        command = [
            "export",
            str(checkpoint),
            "-o",
            str(Path(folder) / "bundle"),
            "--k",
            kept,
            "--set",
            "num_heads=12",
            *([] if verify else ["--no-verify"]),
        ]
        # A process measures itself: its peak would otherwise include this one's.
        outcome = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", *command],
            check=True,
            capture_output=True,
            text=True,
        )
        report = json.loads(outcome.stdout.splitlines()[-1])
        return Scale(
            experts,
            hidden,
            parameters,
            4 * parameters,
            report["seconds"],
            report["peak_bytes"],
            verify,
        )


def _measured_main(arguments: list[str]) -> None:
    import time

    from moexport.cli import app

    started = time.monotonic()
    app(arguments, standalone_mode=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": time.monotonic() - started, "peak_bytes": peak}))


def to_json(scales: list[Scale]) -> str:
    """The measurements and the machine they were made on, as JSON."""
    body = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks scale",
        "environment": environment(),
        "exports": [asdict(scale) for scale in scales],
    }
    return json.dumps(body, indent=1) + "\n"


def from_json(text: str) -> list[Scale]:
    """The measurements in a text that `to_json` wrote."""
    return [Scale(**one) for one in json.loads(text)["exports"]]


if __name__ == "__main__":
    _measured_main(sys.argv[1:])
