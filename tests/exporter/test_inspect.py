"""What `inspect` tells comes from names and shapes: values in a checkpoint change none of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moexport.exporter.checkpoints.load import load
from moexport.exporter.inspect import inspect
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case


@pytest.mark.parametrize("name", [*SOFT_MOE, *MUMOE])
def test_a_checkpoint_whose_values_are_not_read_is_told_of_as_any_other(
    name: str, tmp_path: Path
) -> None:
    case = read_case(name)
    whole = inspect(load(case.weights, config=case.config))
    state = torch.load(case.weights, weights_only=True)
    halves = tmp_path / "halves.pt"
    torch.save({k: t.half() if t.is_floating_point() else t for k, t in state.items()}, halves)
    for path in (case.weights, halves):
        found = inspect(load(path, config=case.config, values=False))
        assert replace(found, notes=()) == replace(whole, notes=())
    assert all(layer.tokens > 0 for layer in whole.layers)
