"""One combination of a hierarchy's experts is removed, whatever form its tensor has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.graphs.layers.mumoe import FactorisedSpec, Form
from moexport.tests.command import run
from moexport.tests.exporter.test_hierarchies import entmax15
from moexport.tests.recorded import ENTMAX

pytestmark = pytest.mark.plugins  # --ablate is a plugin's option

LEVELS, DIM, OUT = (4, 3), 12, 6
RANKS: dict[str, tuple[int, ...]] = {
    "cp": (5,),
    "tr": (3, 2, 4, 2),
    "tucker": (2, 3, 5, 4),
    "full": (),
}
EINSUMS = {
    "cp": "ar,br,dr,or->abdo",
    "tr": "pax,xby,ydz,zop->abdo",
    "tucker": "ijkl,ai,bj,dk,ol->abdo",
}


def checkpoint(form: Form, folder: Path) -> tuple[Path, np.ndarray, list[np.ndarray]]:
    """Writes a layer of two levels; returns it with its whole tensor and its gates, in float64."""
    random = torch.Generator().manual_seed(0)
    spec = FactorisedSpec(form, LEVELS, DIM, OUT, RANKS[form], bias=True)
    factors = [torch.randn(*shape, generator=random) for shape in spec.shapes]
    state = {f"projs.{e}": torch.randn(DIM, n, generator=random) for e, n in enumerate(LEVELS)}
    gates = [state[f"projs.{e}"].double().numpy() for e in range(2)]
    for e, n in enumerate(LEVELS):
        state |= {f"bn.{e}.running_mean": torch.zeros(n), f"bn.{e}.running_var": torch.ones(n)}
    if form == "full":
        state["MuMoE.weight"] = factors[0]
        whole = factors[0].double()
    else:
        names = ["MuMoE.core"] * (form == "tucker")
        names += [f"MuMoE.factors.{j}" for j in range(4)]
        state |= dict(zip(names, factors, strict=True))
        whole = torch.einsum(EINSUMS[form], *(f.double() for f in factors))
    torch.save(state, folder / "layer.pt")
    return folder / "layer.pt", whole.numpy(), gates


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cp", "tr", "tucker", "full"])
def test_one_combination_contributes_nothing(form: Form, tmp_path: Path) -> None:
    path, whole, gates = checkpoint(form, tmp_path)
    x = np.random.default_rng(0).standard_normal((200, 1, DIM)).astype(np.float32)
    np.savez(tmp_path / "x.npz", input=x)
    out = tmp_path / "out"
    outcome = run(
        *("export", path, *ENTMAX, "-o", out, "--ablate", "layer:1+2,2+0", "--ablate", "layer:1.3"),
        *("--target", "ort-cpu", "--data", tmp_path / "x.npz", "--batch", "1:1:256"),
    )
    assert outcome.code == 0, outcome.err
    assert "edited: ablate layer:1+2" in outcome.err
    z = np.c_[x[:, 0], np.ones(len(x))].astype(np.float64)
    a, b = (entmax15(z[:, :DIM] @ gate / np.sqrt(1 + 1e-5)) for gate in gates)
    without = whole.copy()
    without[1, 2] = without[2, 0] = without[3] = 0
    assert ((a[:, 1] * b[:, 2]) > 0).any()  # the combination is one that inputs take
    wanted, trained = (np.einsum("sa,sb,sd,abdo->so", a, b, z, w) for w in (without, whole))
    y = Bundle.open(out).session()(x)[:, 0]
    assert np.abs(y - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert np.abs(trained - wanted).max() > 0.1 * np.abs(wanted).max()
    inspected = run("inspect", out).out
    assert "ablate layer:2+0" in inspected and "ablate layer:1.3" in inspected
    assert run("verify", out).code == 0


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_combination_is_removed_in_fewer_bits(precision: str, tmp_path: Path) -> None:
    path, _, _ = checkpoint("tr", tmp_path)
    x = np.random.default_rng(0).standard_normal((64, 1, DIM)).astype(np.float32)
    np.savez(tmp_path / "x.npz", input=x)
    outcome = run(
        *("export", path, *ENTMAX, "-o", tmp_path / "out", "--ablate", "layer:1+2"),
        *("--precision", precision, "--target", "ort-cpu", "--data", tmp_path / "x.npz"),
    )
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("ablate", "message"),
    [
        ("layer:1+2+0", "has 2 levels of experts, but 3 are named together"),
        ("layer:1+3", "has 3 experts in level 2"),
        ("layer:1+", "is not an expert of a layer"),
    ],
)
def test_combinations_that_are_not_there_are_refused(
    ablate: str, message: str, tmp_path: Path
) -> None:
    path, _, _ = checkpoint("cp", tmp_path)
    outcome = run("export", path, *ENTMAX, "-o", tmp_path / "out", "--ablate", ablate)
    assert outcome.code == 2 and message in outcome.error and outcome.hint
    assert not (tmp_path / "out").exists()
