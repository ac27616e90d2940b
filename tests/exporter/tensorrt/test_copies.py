"""What a `gather` graph copies caps its engine's k, for the batches of the profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moexport.errors import UsageError
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.tensorrt.engines import plan_engines
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.profiles import parse_profile
from moexport.exporter.tensorrt.records import EnginePlan
from moexport.graphs.sizes import AxisRange
from moexport.tests.exporter.tensorrt.engines import build, export, needs_rtx

pytestmark = needs_rtx

LARGE = {"experts": 8, "dim": 768, "hidden": 7680}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("--k", "input", "--lowering", "gather,dense", "--batch", "1:8:64")
    return export("soft_moe_fkodom", tmp_path_factory.mktemp("gather"), *options)


def of_sizes(bundle: Path, sizes: Mapping[str, Any]) -> Manifest:
    """The manifest of a bundle with a layer of other sizes."""
    manifest = Manifest.read(bundle)
    return replace(manifest, layers=[replace(each, **sizes) for each in manifest.layers])


def planned(manifest: Manifest, *profiles: str) -> list[EnginePlan]:
    options = EngineOptions(profiles=tuple(parse_profile(each) for each in profiles))
    return plan_engines(manifest, "tensorrt-rtx", options)


def test_k_is_capped_where_nobody_named_it_and_the_dense_graph_takes_all(exported: Path) -> None:
    gather, dense = planned(of_sizes(exported, LARGE))
    assert gather.profiles[0].k == AxisRange(1, 2, 5)  # 64 inputs × 5 of at most 364
    assert gather.profiles[0].max[0] == 64
    (note,) = gather.notes
    assert "at batch 64 `gather` can copy at most 364 experts" in note and "k up to 5 of 8" in note
    assert dense.profiles[0].k == AxisRange(1, 2, 8)
    assert dense.notes == ()
    small, _ = planned(Manifest.read(exported))
    assert small.profiles[0].k == AxisRange(1, 1, 6) and small.notes == ()


def test_each_profile_is_capped_for_its_own_batch(exported: Path) -> None:
    gather, _ = planned(of_sizes(exported, LARGE), "batch=1", "batch=2:8:90")
    assert [each.k for each in gather.profiles] == [AxisRange(1, 2, 8), AxisRange(1, 2, 4)]
    assert len(gather.notes) == 1


@pytest.mark.parametrize("named", ["batch=64,k=1:2:8", "k=1:2:6", "batch=365,k=1"])
def test_a_k_that_was_named_and_is_too_large_is_an_error(exported: Path, named: str) -> None:
    with pytest.raises(
        UsageError, match=r"model.onnx: at --batch \d+ and --k \d `gather`"
    ) as found:
        planned(of_sizes(exported, LARGE), named)
    assert "--lowering dense" in (found.value.hint or "")


def test_a_baked_in_k_is_held_against_the_batch_too(exported: Path) -> None:
    fixed = replace(of_sizes(exported, LARGE | {"k": 6}), k="6")
    with pytest.raises(UsageError, match="at --batch 64 and --k 6 `gather` copies 384 experts"):
        planned(fixed)
    assert planned(fixed, "batch=60")[0].profiles[0].max[0] == 60
    every = replace(of_sizes(exported, LARGE | {"k": 8}), k="8")  # nothing is to gather
    assert planned(every)[0].profiles[0].max[0] == 64


def test_a_capped_engine_is_built_beside_the_dense_one(exported: Path) -> None:
    """A matrix of 24 × 24: a million inputs leave room for three of the six experts."""
    gather, dense = build(exported, "--profile", "batch=1:1:1000000")
    assert (gather["graph"], gather["profiles"][0]["k"]) == ("model.onnx", [1, 1, 3])
    assert (dense["graph"], dense["profiles"][0]["k"]) == ("model-dense.onnx", [1, 1, 6])
