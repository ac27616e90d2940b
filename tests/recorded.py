"""Recorded cases of published implementations: weights, inputs, outputs and selected experts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
TABLE = DATA / "table.json"
"""A calibration table that belongs to no model."""
MUMOE = sorted(path.name for path in DATA.glob("mumoe_*"))
SOFT_MOE = sorted(path.name for path in DATA.glob("soft_moe_*"))

VIT_CONFIG: dict[str, Any] = {"num_heads": 4, "rest": "default"}
"""Settings that the user of `soft_moe_vit` must give, because shapes do not determine them."""

VIT_SETS = ("--set", "num_heads=4", "--set", "rest=default")

ENTMAX = ("--set", "act=entmax15")
"""Settings that the user of a muMoE layer must give."""


@dataclass(frozen=True)
class RecordedCase:
    """One folder of tests/data."""

    name: str
    folder: Path
    family: str
    config: dict[str, Any]
    ks: tuple[int, ...]
    io: dict[str, np.ndarray]

    @property
    def weights(self) -> Path:
        return self.folder / "weights.pt"

    @property
    def x(self) -> np.ndarray:
        return self.io["x"]

    def y(self, k: int | None = None) -> np.ndarray:
        """Returns the recorded output with all experts, or with Algorithm 1 and k."""
        return self.io["y" if k is None else f"y_k{k}"]

    def chosen(self, k: int) -> list[np.ndarray]:
        """Returns the recorded experts of each MoE layer, [b, k], if there are any."""
        found: list[np.ndarray] = []
        while (key := f"experts_k{k}_layer{len(found)}") in self.io:
            found.append(self.io[key])
        return found


def read_case(name: str) -> RecordedCase:
    """Reads the case in tests/data/NAME, with the configuration that its user would give."""
    folder = DATA / name
    meta = json.loads((folder / "meta.json").read_text())
    config = dict(meta["config"])
    if meta["family"] == "soft-moe-fkodom":
        config["version"] = "0.2.0"  # required in addition to the constructor's arguments
    with np.load(folder / "io.npz") as arrays:
        io = dict(arrays.items())
    return RecordedCase(name, folder, meta["family"], config, tuple(meta["ks"]), io)


def many_experts(folder: Path, count: int = 64) -> Path:
    """Writes a layer of `count` experts, copied from four recorded ones; returns its file."""
    import torch  # this module is also imported without PyTorch

    state = torch.load(read_case("soft_moe_lucidrains").weights)
    experts = {name: tensor for name, tensor in state.items() if name.startswith("experts.")}
    for name, tensor in experts.items():
        _, _, number, rest = name.split(".", 3)
        for copy in range(int(number), count, 4):
            state[f"experts.experts.{copy}.{rest}"] = tensor
    state["slot_embeds"] = torch.randn(count, 1, 32, generator=torch.Generator().manual_seed(0))
    torch.save(state, folder / "layer.pt")
    return folder / "layer.pt"
