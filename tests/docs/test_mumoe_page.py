"""The page on muMoE shows what `inspect` prints."""

from __future__ import annotations

from pathlib import Path

import torch
from moexport.docs.sources import ROOT
from moexport.tests.command import run
from moexport.tests.recorded import ENTMAX


def test_the_sizes_of_a_hierarchy_are_those_that_inspect_prints(tmp_path: Path) -> None:
    levels, rank, dim, out = (128, 4, 4), 256, 512, 1000
    modes = (*levels, dim + 1, out)
    state = {f"MuMoE.factors.{j}": torch.zeros(n, rank) for j, n in enumerate(modes)}
    for e, n in enumerate(levels):
        state[f"projs.{e}"] = torch.zeros(dim, n)
        state |= {f"bn.{e}.running_mean": torch.zeros(n), f"bn.{e}.running_var": torch.ones(n)}
    torch.save(state, tmp_path / "head.pt")
    printed = run("inspect", tmp_path / "head.pt", *ENTMAX).out
    header, *_ = [line for line in printed.splitlines() if line.startswith("MoE layer")]
    row = printed.splitlines()[printed.splitlines().index(header) + 1]
    page = (ROOT / "docs" / "mumoe.md").read_text(encoding="utf-8")
    assert f"```text\n{header}\n{row}\n```" in page
    assert f"{rank * sum(modes) + dim * sum(levels):,}" == "491,776" and row.endswith("492K")
