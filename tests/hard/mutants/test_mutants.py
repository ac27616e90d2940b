"""Damaged graphs that still run are refused: some of `python -m moexport.tests.hard.mutants`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from moexport.exporter.bundle.parity import MAX_STORED, TOLERANCES, Reference, not_compared
from moexport.graphs.targets import Precision, Target

from .bases import Base, bases, subjects
from .damage import Graph, at_k, at_size, repeated
from .judging import by_export, by_verify, damaged_bundle, mutants, whole_graph

SAMPLE: list[tuple[str, Precision, Target, str]] = [
    ("soft_moe_lucidrains_geglu_ln", "fp32", "onnx", "gather"),
    ("soft_moe_lucidrains_geglu_ln", "int8", "ort-cpu", "grouped"),
    ("adapter Experts", "int8", "ort-cpu", "grouped"),
    ("mumoe_tr_2level", "fp32", "onnx", "factorised"),
]


@pytest.mark.parametrize(("name", "precision", "target", "lowering"), SAMPLE)
def test_damage_above_rounding_is_refused_by_the_export_verify_and_bench(
    name: str, precision: Precision, target: Target, lowering: str, tmp_path: Path
) -> None:
    subject = subjects(tmp_path / "models")[name]()
    (base,) = bases(subject, tmp_path / "bundles", [(precision, target)], (lowering,))
    assert isinstance(base, Base), base
    verdicts, _ = mutants(base, tmp_path / "damaged", 1, bench=True)
    assert [each.line() for each in verdicts if each.survives] == []
    killed = [each for each in verdicts if each.killed]
    assert len(killed) >= 7
    assert [each.damage for each in killed if each.in_bench and each.bench is None] == []


@pytest.mark.parametrize(
    ("name", "precision", "target", "lowering", "ks"),
    [
        ("any k soft_moe_lucidrains", "fp32", "onnx", "gather", (1, 2, 4)),
        ("any k soft_moe_lucidrains", "int8", "ort-cpu", "grouped", (1, 2, 4)),
        ("any k mumoe_cp_2level", "fp32", "onnx", "factorised", (1, 2, 4, 8, 16)),
        ("any k mumoe_cp_2level", "int8", "ort-cpu", "factorised", (1, 2, 4, 8, 16)),
    ],
)
def test_damage_at_any_k_that_is_compared_is_refused_by_the_export_and_verify(
    name: str,
    precision: Precision,
    target: Target,
    lowering: str,
    ks: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """Each level of a muMoE layer has a quarter, half and all of its own experts."""
    subject = subjects(tmp_path / "models")[name]()
    (base,) = bases(subject, tmp_path / "bundles", [(precision, target)], (lowering,))
    assert isinstance(base, Base), base
    recorded = base.bundle.manifest.parity
    assert recorded is not None and tuple(recorded["ks"]) == ks
    for k in ks:
        graph = whole_graph(base).copy()
        at_k(graph, k)
        bundle = damaged_bundle(base, graph, tmp_path / "damaged")
        _, at_export = by_export(base, bundle)
        at_verify = by_verify(bundle)
        wanted = f"with k = {k}, the worst of {', '.join(map(str, ks))}: "
        assert at_export is not None and at_export.startswith(wanted)
        assert at_verify is not None and wanted in at_verify


RANGES: list[tuple[str, Precision, Target, str]] = [
    ("sizes soft_moe_lucidrains", "fp32", "onnx", "gather"),
    ("sizes mumoe_cp_block_ln", "int8", "ort-cpu", "factorised"),
    ("sizes adapter own forward", "fp16", "onnx", "gather"),
]


@pytest.mark.parametrize(("name", "precision", "target", "lowering"), RANGES)
def test_damage_at_one_edge_of_a_range_is_refused_by_the_export_and_verify(
    name: str, precision: Precision, target: Target, lowering: str, tmp_path: Path
) -> None:
    subject = subjects(tmp_path / "models")[name]()
    (base,) = bases(subject, tmp_path / "bundles", [(precision, target)], (lowering,))
    assert isinstance(base, Base), base
    assert set(base.sizes) == {"batch", "tokens"}

    def refused(change: Callable[[Graph], None], where: str) -> None:
        graph = whole_graph(base).copy()
        change(graph)
        bundle = damaged_bundle(base, graph, tmp_path / "damaged")
        _, at_export = by_export(base, bundle)
        at_verify = by_verify(bundle)
        assert at_export is not None and at_export.startswith(where)
        assert at_verify is not None and where in at_verify

    batch, tokens = base.sizes["batch"], base.sizes["tokens"]
    for size in (batch.min, batch.max):
        refused(partial(at_size, axis="batch", size=size), f"in a batch of {size}: ")
    for size in (tokens.min, tokens.max):
        refused(partial(at_size, axis="tokens", size=size), f"with {size} tokens: ")
    # A block in place of a later one, as long as the inputs are many.
    again = partial(repeated, op="Mod")
    refused(partial(again, axis="batch", beyond=len(base.expected.x)), "in a batch of ")
    assert base.expected.x.shape[1] < tokens.max
    refused(partial(again, axis="tokens", beyond=base.expected.x.shape[1]), "with ")


def test_damage_far_below_the_bound_of_fp32_is_refused(tmp_path: Path) -> None:
    subject = subjects(tmp_path / "models")["soft_moe_conv"]()
    (base,) = bases(subject, tmp_path / "bundles", [("fp32", "onnx")], ("gather",))
    assert isinstance(base, Base), base
    parity = base.bundle.manifest.parity
    assert parity is not None and parity["apart"] < 4
    verdicts, _ = mutants(base, tmp_path / "damaged", 1)
    (tanh,) = (each for each in verdicts if each.damage == "activation")
    assert tanh.effect < TOLERANCES["fp32"].rtol / 2
    assert tanh.export is not None and "float64" in tanh.export
    assert tanh.verify is not None and "float64" in tanh.verify


def reference(chosen: list[list[int]]) -> Reference:
    """Inputs that choose those experts of a layer."""
    count = len(chosen)
    return Reference(
        x=np.arange(count, dtype=np.float32)[:, None],
        y=np.zeros((count, 1), np.float32),
        dense=np.zeros((count, 1), np.float32),
        selected={"moe": np.array(chosen)},
        margin={"moe": np.ones(count, np.float32)},
        kept={"moe": 2},
    )


def test_inputs_that_reach_further_experts_are_kept() -> None:
    first = reference([[0, 1], [0, 1]])
    kept = first.with_unreached(reference([[0, 1], [1, 3], [0, 3], [3, 4]]), MAX_STORED)
    assert kept.x[:, 0].tolist() == [0.0, 1.0, 1.0, 3.0]
    assert kept.reached() == {"moe": frozenset({0, 1, 3, 4})}
    assert first.with_unreached(reference([[2, 3]]), limit=2) is first
    other = replace(reference([[2, 3]]), x=np.zeros((1, 7), np.float32))
    assert first.with_unreached(other, MAX_STORED) is first


def test_experts_that_no_input_chose_are_told() -> None:
    text = not_compared(reference([[0, 1], [0, 3]]).reached(), {"moe": 5})
    assert text == "experts that no input chose were not compared: 2 of 5 in layer moe (2, 4)"
    assert not_compared({"moe": frozenset(range(5))}, {"moe": 5}) == ""
