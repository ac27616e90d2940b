"""Edited layers compute the edited formulas: in PyTorch, and in every graph."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import onnx_ir as ir
import pytest
import torch
from moexport.graphs.edits import NO_EDITS, Ablation, Edits, Rewrite, Steer
from moexport.graphs.layers.base import sharing_weights
from moexport.graphs.layers.mumoe import Form, MuMoE
from moexport.graphs.layers.soft_moe import ExpertKind, SoftMoE, SoftMoEWeights
from moexport.graphs.lowerings import lowerings_of
from moexport.tests.graphs.lowerings.test_mumoe import spec_of
from moexport.tests.graphs.mumoe_layers import FORMS, InMemory, formula, graph, random_layer, run
from moexport.tests.graphs.soft_moe_layers import (
    Array,
    TinyLayer,
    lowered,
    session,
    soft_moe,
    tiny_layer,
    tokens,
    torch_module,
)

LOWERINGS = lowerings_of("soft-moe")

RTOL = 2e-5  # of max|y|: float32 against float64
ABLATED = (1, 4)
LEVELS = ((8,), (5, 4), (4, 3, 2))


def assert_close(y: Array, expected: Array) -> None:
    assert y.shape == expected.shape
    assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


def module(layer: TinyLayer) -> SoftMoE:
    """The layer in PyTorch, without the experts of `ABLATED`."""
    made = torch_module(layer)
    made.edits = Edits(tuple(Ablation("", e) for e in ABLATED))
    return made


def stored(layer: SoftMoE) -> InMemory:
    """What a bundle would hold of the layer."""
    return InMemory(
        {
            part.name: np.concatenate([np.ravel(piece) for piece in part.parts]).reshape(part.shape)
            for part in layer.stored()
        }
    )


def assert_edited(layer: TinyLayer, lowering: str, *, renormalize: bool = False) -> None:
    spec, x = layer.spec, tokens(3, 6)
    edited = module(layer)
    edited.renormalize = renormalize
    for kept, k in ((spec.experts, spec.experts), (2, 2), (None, 3)):
        edited.keep = k
        expected, sets = soft_moe(layer, x, k, ablated=ABLATED, renormalize=renormalize)
        whole, all_sets = soft_moe(layer, x, k, renormalize=renormalize)
        assert np.abs(whole - expected).max() > 0.01 * np.abs(whole).max()  # the edit shows
        assert np.array_equal(sets, all_sets)  # and changes no choice
        if k < spec.experts:
            assert set(ABLATED) & set(sets.flatten())  # an ablated expert may be chosen
        y = edited(torch.from_numpy(x)).numpy()
        assert_close(y, expected)
        graph = lowered(layer, lowering, kept, renormalize=renormalize, tensors=stored(edited))
        feeds = {"input": x} if kept is not None else {"input": x, "k": np.array([k])}
        y, *chosen = session(graph).run(None, feeds)
        assert_close(y, expected)
        for selected in chosen:
            assert np.array_equal(np.sort(selected, axis=1), sets)


@pytest.mark.parametrize("expert", get_args(ExpertKind))
def test_an_ablated_expert_contributes_nothing_in_any_lowering(expert: ExpertKind) -> None:
    for index, (name, record) in enumerate(LOWERINGS.items()):
        layer = tiny_layer(expert=expert, slots=2, biases=index % 2 == 0)
        if record.unable(layer.spec) is None:
            assert_edited(layer, name)


@pytest.mark.parametrize("lowering", list(LOWERINGS))
def test_the_others_are_renormalised_as_if_nothing_were_ablated(lowering: str) -> None:
    assert_edited(tiny_layer(), lowering, renormalize=True)


def test_a_loop_over_experts_leaves_the_ablated_out_too() -> None:
    layer, x = tiny_layer(), tokens(3, 6)
    edited = module(layer)
    edited.keep, edited.algorithm = 2, "selected"
    assert_close(edited(torch.from_numpy(x)).numpy(), soft_moe(layer, x, 2, ablated=ABLATED)[0])


def means(levels: tuple[int, ...], seed: int) -> tuple[tuple[float, ...], ...]:
    random = np.random.default_rng(seed)
    return tuple(tuple(random.dirichlet(np.ones(n)).tolist()) for n in levels)


def edits(layer: MuMoE, *, ablate: bool, rewrite: bool) -> Edits:
    levels, last = layer.spec.levels, len(layer.spec.levels)
    ablations = (Ablation("", 2, 1), Ablation("", 1, last), Ablation("", 0, last))
    rewrites = (
        Rewrite("", 3, means(levels, 1), 20.0),
        Rewrite("", 3, means(levels, 2), -7.5),  # two subgroups of one output
        Rewrite("", 0, means(levels, 3), 4.0),
    )
    return Edits((*(ablations if ablate else ()), *(rewrites if rewrite else ())))


@pytest.mark.parametrize(
    ("ablate", "rewrite", "keep"), [(True, False, 2), (False, True, None), (True, True, 2)]
)
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_an_edited_mumoe_computes_the_edited_formula(
    form: Form, levels: tuple[int, ...], ablate: bool, rewrite: bool, keep: int | None
) -> None:
    layer = random_layer(spec_of(form, levels, block=ablate, bias=rewrite))
    x = np.random.default_rng(7).standard_normal((4, 5, 10)).astype(np.float32)
    trained = formula(layer, x.astype(np.float64), keep)
    layer.edits = edits(layer, ablate=ablate, rewrite=rewrite)
    expected = formula(
        layer,
        x.astype(np.float64),
        keep,
        ablated=tuple(((one.level or 1) - 1, one.expert) for one in layer.edits.ablations),
        rewrites=layer.edits.rewrites,
    )
    assert np.abs(expected - trained).max() > 0.01 * np.abs(trained).max()
    before = layer.choices(torch.from_numpy(x))
    layer.keep = keep
    assert_close(layer(torch.from_numpy(x)).numpy(), expected)
    assert_close(run(graph(layer, keep), x), expected)
    layer.keep, layer.edits = None, NO_EDITS
    after = layer.choices(torch.from_numpy(x))
    for level, choice in before.items():
        assert torch.equal(choice.chosen, after[level].chosen)


@pytest.mark.parametrize(("levels", "more"), [((8,), 2), ((5, 4), 5)])
def test_edits_cost_few_nodes_or_none(levels: tuple[int, ...], more: int) -> None:
    layer = random_layer(spec_of("cp", levels))
    plain = [node.op_type for node in ir.to_proto(graph(layer)).graph.node]
    layer.edits = edits(layer, ablate=True, rewrite=False)
    assert [node.op_type for node in ir.to_proto(graph(layer)).graph.node] == plain
    layer.edits = edits(layer, ablate=True, rewrite=True)
    rewritten = [node.op_type for node in ir.to_proto(graph(layer)).graph.node]
    assert len(rewritten) == len(plain) + more
    assert set(rewritten[len(plain) :]) <= {"MatMul", "Mul", "Add"}


def test_a_layer_in_single_matrices_is_edited_as_a_stacked_one() -> None:
    layer = tiny_layer()
    edited = module(layer)
    assert layer.w2 is not None
    parts = [torch.from_numpy(w.astype(np.float32)) for w in layer.w1]
    more = [torch.from_numpy(w.astype(np.float32)) for w in layer.w2]
    single = SoftMoE(
        replace(layer.spec),
        SoftMoEWeights(edited.phi, tuple(parts), edited.b1, tuple(more), edited.b2),
    )
    single.edits = edited.edits
    for name, array in stored(edited).arrays.items():
        assert np.array_equal(stored(single).arrays[name], array)
    assert not stored(edited).arrays["experts.w2"][list(ABLATED)].any()
    assert edited.w2 is not None and edited.w2[ABLATED[0]].any()  # the weights themselves stay


def test_a_copy_shares_parameters_and_buffers() -> None:
    norm = torch.nn.BatchNorm1d(2)
    twin = sharing_weights(norm)
    assert twin is not norm
    assert [t.data_ptr() for t in twin.state_dict().values()] == [
        t.data_ptr() for t in norm.state_dict().values()
    ]


def test_edits_are_one_list_kind_by_kind_and_a_layer_sees_its_own() -> None:
    late = [Steer(name, 2, strength=None) for name in ("first", "second")]
    edits = Edits((*late, Rewrite("second", 0, ((1.0,),), 2.0), Ablation("first", 3, 2)))
    assert [record["edit"] for record in edits.records()] == ["ablate", "rewrite", "steer", "steer"]
    assert Edits.from_records(edits.records(), "here") == edits
    second = edits.of("second")
    assert (second.steers, second.ablations) == ((late[1],), ())
    assert second.at_run_time == tuple(late)  # the input has the strengths of all layers
    assert (edits.of("first").ablated_in(0), edits.of("first").ablated_in(1)) == ((), (3,))
    assert second and not Edits()
