"""What `python -m perf mumoe` times as the published code computes what the reference computes."""

from __future__ import annotations

import pytest
import torch
from moexport.examples.studies.random_layers import random_mumoe
from moexport.graphs.layers.mumoe import FactorisedSpec, GateNorm, MuMoESpec
from moexport.perf.layers.mumoe import PublishedMuMoE


@pytest.mark.parametrize(("form", "ranks"), [("cp", (6,)), ("tr", (2, 3, 4))])
@pytest.mark.parametrize("norm", ["bn", "ln"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tensors", [1, 2])
def test_the_published_calls_agree_with_the_reference(
    form: str, ranks: tuple[int, ...], norm: GateNorm, bias: bool, tensors: int
) -> None:
    sizes = ((12, 20), (20, 12))[:tensors]
    held = tuple(
        FactorisedSpec(form, (8,), *size, ranks, bias=bias)  # type: ignore[arg-type]
        for size in sizes
    )
    layer = random_mumoe(MuMoESpec("layer", held, norm=norm)).eval()
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = layer(x)
        off = PublishedMuMoE(layer).eval()(x) - expected
    assert off.abs().max() < 1e-5 * expected.abs().max()
