"""The cost model chooses among what can serve, says why, and grows where the work grows."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
from moexport.errors import LoweringError
from moexport.graphs.cards import GPUS
from moexport.graphs.layers.soft_moe import SoftMoESpec
from moexport.graphs.lowerings import all_names, check_name, dense, lowerings_of
from moexport.graphs.lowerings.base import Lowering, SoftMoEPlan
from moexport.graphs.lowerings.choice import (
    CALL_US,
    MUCH_SLOWER,
    SPLIT_RATIO,
    batch_spans,
    check,
    choose,
    exact_lowerings,
)
from moexport.graphs.lowerings.cost import around_experts_us, machine_for
from moexport.graphs.targets import CPU, TARGETS, Precision, Target

LOWERINGS = lowerings_of("soft-moe")


LARGE = SoftMoESpec("large", 8, 1, 768, 7680, 768, norm="l2")  # few experts of 47 MB
SMALL = SoftMoESpec("small", 128, 1, 768, 384, 768, norm="l2")  # many of 2.4 MB


def work(spec: SoftMoESpec, kept: int, batch: int = 1, tokens: int = 197) -> SoftMoEPlan:
    return SoftMoEPlan(spec, kept, batch, tokens)


def chosen(spec: SoftMoESpec, kept: int, batch: int = 1, target: Target = "onnx") -> str:
    return choose(work(spec, kept, batch), target).lowering.name


def test_one_input_with_few_of_many_small_experts_gathers_their_weights() -> None:
    assert chosen(SMALL, 1) == "gather"
    assert chosen(replace(SMALL, experts=512), 4) == "gather"


def test_few_large_experts_are_grouped() -> None:
    for batch in (1, 16, 100):
        for kept in (1, 2, 4):
            assert chosen(LARGE, kept, batch) == "grouped"


def test_gathering_is_left_as_the_batch_grows() -> None:
    names = [chosen(SMALL, 1, batch) for batch in (1, 16, 100)]
    assert names[0] == "gather"
    assert "gather" not in names[1:]


@pytest.mark.parametrize("target", TARGETS.names)
@pytest.mark.parametrize("spec", [LARGE, SMALL], ids=lambda spec: str(spec.name))
def test_every_target_has_an_exact_choice_for_every_k_and_says_why(
    spec: SoftMoESpec, target: Target
) -> None:
    for kept in (1, spec.experts // 4, spec.experts):
        for batch in (1, 100):
            choice = choose(work(spec, kept, batch), target)
            assert target in choice.lowering.targets
            assert choice.lowering.problem(spec, "fp32", target) is None
            assert choice.lowering.inexact(spec, "fp32", target) is None
            assert choice.predicted_us > 0
            assert f"k = {kept} of {spec.experts} at batch {batch}" in choice.reason
            named = re.findall(r"[a-z]+(?:-[a-z]+)*", choice.reason)
            others = [r for r in LOWERINGS.values() if r.name in named]
            assert choice.lowering not in others
            assert all(target in record.targets for record in others)


def test_the_choice_is_the_fastest_by_prediction() -> None:
    for spec, kept, batch in ((LARGE, 2, 1), (SMALL, 16, 1), (SMALL, 32, 16), (LARGE, 8, 100)):
        choice = choose(work(spec, kept, batch), "onnx")
        predictions = {
            record.name: record.predict_us(work(spec, kept, batch), CPU)
            for record in LOWERINGS.values()
            if "onnx" in record.targets and not record.inexact(spec, "fp32", "onnx")
        }
        assert choice.predicted_us == min(predictions.values())
        assert predictions[choice.lowering.name] == choice.predicted_us


@pytest.mark.parametrize(
    ("spec", "kept", "batch", "dense_us", "gather_us"),
    [
        (SMALL, 32, 1, 53, 40),
        (SMALL, 16, 1, 53, 20),
        (SMALL, 32, 8, 53, 260),
        (SMALL, 32, 64, 63, 1750),
        (LARGE, 2, 1, 66, 50),
        (LARGE, 2, 8, 66, 325),
    ],
)
def test_a_card_is_predicted_by_the_bytes_and_multiplications_of_its_data_sheet(
    spec: SoftMoESpec, kept: int, batch: int, dense_us: float, gather_us: float
) -> None:
    """By hand: FP16 on an H100 at 85% of its bandwidth, every byte from memory, without nodes.

    A gathered copy is written and read again beside the experts that are read; 64 inputs of all
    experts are 4.8 billion multiplications, 10 µs.
    """
    machine = replace(GPUS["H100"]["fp16"], node_us=0.0, cached=1.0)
    size = SoftMoEPlan(spec, kept, batch, 197, "fp16")
    around = around_experts_us(size, machine)
    predicted = {n: LOWERINGS[n].predict_us(size, machine) - around for n in ("dense", "gather")}
    assert predicted["dense"] == pytest.approx(dense_us, rel=0.1)
    assert predicted["gather"] == pytest.approx(gather_us, rel=0.05)
    wanted = "gather" if batch == 1 else "dense"
    choice = choose(size, "tensorrt")
    assert choice.lowering.name == wanted
    assert "H100, estimated from its data sheet, not measured" in choice.reason


@pytest.mark.parametrize(
    ("spec", "kept", "batch", "fused_us", "fastest"),
    [
        (SMALL, 32, 1, 13, "fused"),
        (SMALL, 16, 1, 7, "fused"),
        (SMALL, 16, 2, 12, "fused"),
        (SMALL, 16, 8, 35, "dense"),
        (SMALL, 32, 8, 48, "dense"),
        (SMALL, 32, 64, 53, "dense"),
        (LARGE, 2, 1, 17, "fused"),
        (LARGE, 1, 8, 44, "dense"),
        (LARGE, 2, 8, 60, "dense"),
    ],
)
def test_a_card_reads_each_chosen_expert_once_in_the_fused_node(
    spec: SoftMoESpec, kept: int, batch: int, fused_us: float, fastest: str
) -> None:
    """By hand as above, the bytes alone: what the node's kernels take decides what is near."""
    size = replace(
        SoftMoEPlan(spec, kept, batch, 197, "fp16"), spec=replace(spec, activation="relu")
    )
    machine = replace(
        machine_for("ort-cuda", "fp16"),
        node_us=0.0,
        macs_per_us=math.inf,
        processor_bytes_per_us=math.inf,
    )
    predicted = LOWERINGS["fused"].predict_us(size, machine) - around_experts_us(size, machine)
    assert round(predicted) == fused_us
    choice = choose(size, "ort-cuda")
    assert choice.lowering.name == fastest
    assert "H100, with rates fitted to runs on it; fused predicted, not measured" in choice.reason


def test_few_columns_keep_few_of_a_cards_processors_reading() -> None:
    """By hand, in FP16: 768 columns are six tiles, each of 30720 rows of 256 bytes at 110 GB/s."""
    size = SoftMoEPlan(replace(LARGE, hidden=30720, activation="relu"), 1, 1, 197, "fp16")
    machine = replace(machine_for("ort-cuda", "fp16"), node_us=0.0, macs_per_us=math.inf)
    predicted = LOWERINGS["fused"].predict_us(size, machine) - around_experts_us(size, machine)
    first = 768 * 30720 * 2 / 2847.5e3
    second = 30720 * 256 / 110e3
    assert predicted == pytest.approx(first + second, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_on_a_gpu_auto_never_takes_a_branch_for_each_expert(precision: Precision) -> None:
    for n, d, h in itertools.product((2, 8, 32, 128), (64, 384, 1024), (256, 1536, 30720)):
        for activation, expert in (("gelu", "mlp"), ("relu2", "mlp"), ("gelu", "gated")):
            spec = SoftMoESpec("layer", n, 1, d, h, d, expert, activation)  # type: ignore[arg-type]
            for kept, batch in itertools.product({1, max(1, n // 4), n}, (1, 8, 32)):
                size = SoftMoEPlan(spec, kept, batch, 197, precision)
                choice = choose(size, "ort-cuda")
                assert choice.lowering.name != "conditional"
                assert "conditional" not in choice.reason
    assert check("conditional", size, "ort-cuda").lowering.name == "conditional"


def test_gelu_in_the_fused_node_is_a_choice_where_rounding_is_larger() -> None:
    exact, tanh = (replace(SMALL, activation=each) for each in ("gelu", "gelu-tanh"))
    for spec in (exact, tanh):
        assert choose(SoftMoEPlan(spec, 16, 2, 197, "fp16"), "ort-cuda").lowering.name == "fused"
    assert choose(SoftMoEPlan(exact, 16, 2, 197, "fp32"), "ort-cuda").lowering.name != "fused"
    assert (
        check("fused", SoftMoEPlan(tanh, 16, 2, 197, "fp32"), "ort-cuda").lowering.name == "fused"
    )


@pytest.mark.parametrize(("card", "rows"), [("H100", 620), ("RTX 4090", 350)])
def test_tiles_pay_on_a_card_once_an_expert_has_hundreds_of_rows(card: str, rows: int) -> None:
    spec, machine = replace(LARGE, hidden=3072), GPUS[card]["fp16"]

    def wins(per_expert: int) -> bool:
        size = SoftMoEPlan(spec, 2, 4 * per_expert, 197, "fp16")
        grouped = LOWERINGS["block-grouped"].predict_us(size, machine)
        return grouped < LOWERINGS["dense"].predict_us(size, machine)

    assert not wins(rows // 2)
    assert wins(2 * rows)


def ratios(spec: SoftMoESpec, kept: int, batches: tuple[int, ...]) -> dict[str, list[float]]:
    """By lowering, its predicted time over the fastest's at each batch."""
    times = {
        record.name: [record.predict_us(work(spec, kept, size), CPU) for size in batches]
        for record in exact_lowerings(work(spec, kept), "onnx")
    }
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    return {name: [a / b for a, b in zip(us, fastest, strict=True)] for name, us in times.items()}


def test_over_a_range_of_batches_the_choice_is_never_far_from_the_fastest() -> None:
    told = 0
    for n, d, h in itertools.product((4, 16, 64, 512), (32, 192, 768), (64, 384)):
        spec = SoftMoESpec("layer", n, 1, d, h, d)
        for kept in {1, max(1, n // 16), max(1, n // 4), n}:
            for batches in ((1, 32), (1, 4096)):
                choice = choose(work(spec, kept), "onnx", batches)
                found = ratios(spec, kept, batches)
                worst = {name: max(each) for name, each in found.items()}
                chosen_worst = worst[choice.lowering.name]
                assert chosen_worst <= min(worst.values()) + 0.01
                assert f"at batch {batches[0]} and {batches[1]}" in choice.reason
                assert ("--lowering auto," in choice.reason) == (chosen_worst >= MUCH_SLOWER)
                told += chosen_worst >= MUCH_SLOWER
    assert told  # some layers do have a lowering for each end


def test_where_another_lowering_is_much_faster_at_an_end_it_is_said_how_to_get_it() -> None:
    spec = SoftMoESpec("layer", 64, 1, 32, 64, 32)
    choice = choose(work(spec, 2), "onnx", (1, 4096))
    at = {
        f.name: ratios(spec, 2, (1, 4096))[f.name] for f in exact_lowerings(work(spec, 2), "onnx")
    }
    for place, size in enumerate((1, 4096)):
        best = next(name for name, each in at.items() if each[place] == 1.0)
        said = f"--batch {size} selects it, --lowering auto,{best} writes both"
        assert (said in choice.reason) == (at[choice.lowering.name][place] >= MUCH_SLOWER)


def test_a_range_is_divided_where_no_lowering_is_near_the_fastest_for_all_of_it() -> None:
    divided = 0
    for n, d, h in itertools.product((4, 16, 64, 512), (32, 192, 768), (64, 384)):
        spec = SoftMoESpec("layer", n, 1, d, h, d)
        for kept in {1, max(1, n // 16), max(1, n // 4), n}:
            layer = work(spec, kept)
            for first, last in ((1, 32), (3, 4096)):
                spans = batch_spans([replace(layer, batch=first)], "onnx", first, last)
                starts, ends = zip(*spans, strict=True)
                assert (starts[0], ends[-1]) == (first, last)
                assert [end + 1 for end in ends[:-1]] == list(starts[1:])
                assert all(start <= end for start, end in spans)
                names = {choose(replace(layer, batch=a), "onnx", (a, b)).lowering for a, b in spans}
                assert len(names) > 1 or len(spans) == 1
                one = max(
                    (CALL_US + choose(layer, "onnx", (first, last)).lowering.predict_us(at, CPU))
                    / (CALL_US + choose(at, "onnx").predicted_us)
                    for size in (first, last)
                    for at in (replace(layer, batch=size),)
                )
                assert one < SPLIT_RATIO or len(spans) > 1 or first > 1
                divided += len(spans) > 1
    assert divided


def test_a_batch_of_one_size_is_not_divided_and_layers_are_judged_together() -> None:
    small, large = SoftMoESpec("small", 64, 1, 32, 64, 32), replace(LARGE, name="much larger")
    assert batch_spans([work(small, 2)], "onnx", 8, 8) == [(8, 8)]
    assert len(batch_spans([work(SMALL, 32)], "onnx", 1, 4096)) == 1
    alone = batch_spans([work(small, 16)], "onnx", 1, 4096)
    assert len(alone) > 1
    # What a small layer could win is nothing beside a layer that takes the time.
    assert batch_spans([work(small, 16), work(large, 2)], "onnx", 1, 32) == [(1, 32)]


def test_a_lowering_that_is_not_exact_is_never_chosen_but_may_be_asked_for() -> None:
    relu = replace(SMALL, activation="relu")
    exact = {
        choose(work(spec, k, b), "ort-cpu").lowering.name
        for spec in (SMALL, LARGE)
        for k in (1, 4, 8)
        for b in (1, 16, 100)
    }
    assert "fused" not in exact
    asked = check("fused", work(SMALL, 16), "ort-cpu")
    assert "tanh form of GELU" in asked.reason
    assert check("fused", work(relu, 16), "ort-cpu").reason == "requested"


@pytest.mark.parametrize(
    ("name", "spec", "target", "why"),
    [
        ("grouped", SMALL, "tensorrt", "the target tensorrt does not support it"),
        ("grouped", SMALL, "tensorrt-rtx", "the target tensorrt-rtx does not support it"),
        ("fused", SMALL, "onnx", "the target onnx does not support it"),
        ("fused", replace(SMALL, expert="gated"), "ort-cpu", "not support gated experts"),
        ("fused", replace(SMALL, out=10), "ort-cpu", "this layer maps 768 to 10"),
    ],
)
def test_what_cannot_serve_is_refused_with_the_reason_and_the_able(
    name: str, spec: SoftMoESpec, target: Target, why: str
) -> None:
    with pytest.raises(LoweringError) as caught:
        check(name, work(spec, 16), target)
    assert why in caught.value.message
    assert "layer small" in caught.value.message
    assert caught.value.hint is not None
    offered = caught.value.hint.rpartition(": ")[2].split(", ")
    assert name not in offered
    assert {"dense", "gather", "conditional"} <= set(offered)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(LoweringError, match="no lowering 'fast'") as caught:
        check_name("fast")
    assert caught.value.hint == f"choose one of: auto, {', '.join(all_names())}"


@pytest.mark.parametrize("spec", [LARGE, SMALL], ids=lambda spec: str(spec.name))
@pytest.mark.parametrize("name", list(LOWERINGS))
@pytest.mark.parametrize("target", ["onnx", "tensorrt"])
def test_more_work_is_never_predicted_to_take_less_time(
    name: str, spec: SoftMoESpec, target: Target
) -> None:
    machine, record, n = machine_for(target), LOWERINGS[name], spec.experts
    for batch in (1, 16, 100):
        # k = n is another graph: nothing is selected, so it is compared with no other k.
        times = [record.predict_us(work(spec, k, batch), machine) for k in range(1, n)]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(times))
    for kept in (1, n // 4, n):
        times = [record.predict_us(work(spec, kept, b), machine) for b in (1, 2, 8, 32, 128)]
        assert times == sorted(times)
        times = [record.predict_us(work(spec, kept, 4, m), machine) for m in (1, 16, 196, 1024)]
        assert times == sorted(times)


def test_expected_active_experts_lie_between_k_and_n() -> None:
    for kept in (1, 16, 64, 128):
        counts = [work(SMALL, kept, batch).expected_active for batch in (1, 2, 8, 64, 4096)]
        assert counts[0] == pytest.approx(kept)
        assert counts == sorted(counts)
        assert counts[-1] == pytest.approx(128)
        assert all(kept - 1e-9 <= count <= 128 for count in counts)
    # Two inputs that each choose 1 of 4 meet at the same expert a quarter of the time.
    four = replace(SMALL, experts=4)
    assert work(four, 1, 2).expected_active == pytest.approx(2 - 1 / 4)


def test_multiply_adds_are_those_of_the_formulas() -> None:
    m, d, n, p, k, h = 197, 768, 128, 1, 16, 384
    macs = SMALL.macs(m, k)
    assert macs == {
        "router": m * d * n * p,
        "dispatch": m * d * k * p,
        "experts": k * p * 2 * d * h,
        "combine": m * k * p * d,
    }
    everything = sum(SMALL.macs(m, n).values())
    assert everything / sum(macs.values()) == pytest.approx(4.0, abs=0.1)  # not 8: the router stays


@pytest.mark.parametrize(("experts", "typical"), [(128, 32), (7, 1), (2, 1)])
def test_where_k_is_an_input_times_are_predicted_for_a_quarter_of_the_experts(
    experts: int, typical: int
) -> None:
    spec = replace(SMALL, experts=experts)
    late, known = (SoftMoEPlan(spec, k, 3, 197) for k in (None, typical))
    assert late.typical_k == known.typical_k == typical
    assert (late.selections, late.expected_active) == (known.selections, known.expected_active)
    chosen, same = (choose(each, "ort-cpu", (1, 3)) for each in (late, known))
    assert chosen == replace(same, k=None)
    assert f"for k = {typical} of {experts} at" in chosen.reason


def test_a_lowering_that_names_no_limits_serves_all_exactly_and_copies_nothing() -> None:
    plain = Lowering("plain", "", build=dense.build, predict_us=dense.predict_us)
    assert plain.targets == frozenset(TARGETS.names)
    assert plain.problem(SMALL, "int4", "ort-web") is None
    assert plain.inexact(SMALL, "fp32", "onnx") is None
    assert plain.copied_bytes(work(SMALL, 2)) == 0.0
    limited = replace(plain, needs=lambda _: False, unable=lambda _: "never")
    assert limited.problem(SMALL, "fp32", "onnx") == "the target onnx does not support it"
    limited = replace(plain, unable=lambda _: "never", no_kernel=lambda *_: "nowhere")
    assert limited.problem(SMALL, "fp32", "onnx") == "never"
    assert replace(limited, unable=lambda _: None).problem(SMALL, "fp32", "onnx") == "nowhere"
