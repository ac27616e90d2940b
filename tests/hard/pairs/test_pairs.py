"""Some rows of the matrix, others for each day's commits; `make pairs` runs all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from moexport.tests.hard.pairs.__main__ import counts, everything, read
from moexport.tests.hard.pairs.matrix import PLAIN, all_pairs, alone, commit, conflict, pairs, rows
from moexport.tests.hard.pairs.networks import routed
from moexport.tests.hard.pairs.rows import Attempt, Row, attempt
from moexport.tests.hard.pairs.sources import source
from moexport.tests.traces import traced_once

SLOW = frozenset({"mumoe-mixer", "mumoe-gpt2", "transformers", "tune", "calibrate"})
"""Values of rows that take long."""

SAMPLE = 5


def sample(seed: str) -> Iterator[Row]:
    chosen = random.Random(seed)
    every = rows()
    quick = [row for row in every if not SLOW & {*row.values()}]
    yield from chosen.sample(quick, SAMPLE - 1)
    yield chosen.choice([row for row in every if SLOW & {*row.values()}])


SEED = commit("%cd")


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", list(sample(SEED)), ids=lambda row: f"{SEED}: {' '.join(row.values())}"
)
def test_a_row_is_right_or_refused_in_words(row: Row, tmp_path: Path) -> None:
    with traced_once():
        result = attempt(row, source(row["source"], tmp_path / "source"), tmp_path / "row")
    assert result.verdict in ("right", "refused"), f"seed {SEED}: {row}: {result.said}"


def test_every_pair_is_in_a_row_of_many_or_in_one_of_its_own() -> None:
    together = {pair for row in rows() for pair in pairs(row)}
    apart = all_pairs() - together
    assert {pair for pair in apart if not {*pair} <= {*alone(pair).items()}} == set()
    assert not any(conflict(row) for row in rows())


def test_a_run_that_was_cut_off_goes_on_with_the_rows_that_its_file_lacks(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    both = [{**PLAIN, "lowering": each} for each in ("gathered", "factorised")]  # for other layers
    everything(both[:1], file, jobs=1)
    held = file.read_text()
    file.write_text(held + held[:40])
    everything(both, file, jobs=1)
    lines = file.read_text().splitlines(keepends=True)
    assert lines[0] == held and len(lines) == 3
    found = [*read(file).values()]
    assert [each.row for each in found] == both
    assert [each.verdict for each in found] == ["refused", "refused"]
    assert counts(found).startswith("rows 2: right 0, refused 2, raw 0; pairs ")


def test_an_int4_graph_with_a_k_per_layer_computes_what_its_dequantised_weights_give(
    tmp_path: Path,
) -> None:
    """So what it is off by is its weights' rounding, and no choice of another layer's k."""
    given = source("adapter Experts", tmp_path / "source")
    row = {**PLAIN, "source": given.name, "k": "list", "precision": "int4", "lowering": "grouped"}
    work = Attempt(row, given, tmp_path / "row")
    work.moexport("export", *work.command_line()[0], writes="out")
    stored = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in onnx.load(work.bundle / "model.onnx").graph.initializer
    }
    network: Any = routed().double()
    with torch.no_grad():
        for (name, k), layer in zip(
            work.kept().items(), (network.first, network.second), strict=True
        ):
            layer.k = k
            for i in range(6):
                w1, w2 = (_dequantised(stored, f"{name}/experts.{i}.w{at}") for at in (1, 2))
                for key, rounded in zip(("gate", "up", "down"), (*w1.chunk(2), w2), strict=True):
                    own = layer.maps[key][i]
                    assert 0 < (rounded - own).abs().max() < 0.15 * own.abs().max()
                    own.copy_(rounded)
        (x,) = given.x.values()
        wanted = network(torch.from_numpy(x).double()).numpy()
        network.first.k, network.second.k = network.second.k, network.first.k
        swapped = network(torch.from_numpy(x).double()).numpy()
    found = work.outputs(work.bundle)
    most = np.abs(wanted).max()
    assert np.abs(found - wanted).max() < 0.03 * most  # a row of activations is INT8
    assert np.abs(found - swapped).max() > 0.1 * most


def _dequantised(stored: Mapping[str, np.ndarray], name: str) -> torch.Tensor:
    """A matrix [out, in] of 4-bit steps in blocks, the low half of each byte first."""
    packed, scale = stored[name], stored[f"{name}.scale"].astype(np.float64)
    steps = np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:2], -1) - 8.0
    return torch.from_numpy((steps * scale[..., None]).reshape(len(packed), -1))
