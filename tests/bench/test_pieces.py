"""Single pieces of a benchmark: memory, parts of a profile, perplexity, intervals, compilation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.bench.available import KINDS, parse_engines, select
from moexport.bench.engines import CompiledPyTorch, PyTorch
from moexport.bench.graph_runner import OnnxOpener
from moexport.bench.memory import measure_memory, portable
from moexport.bench.parts import parts_of, parts_of_profile, place
from moexport.bench.perplexity import Sequences, Surprise
from moexport.bench.results import Interval
from moexport.bench.statistics import paired_ratio, wilson
from moexport.errors import FeedError, UsageError
from moexport.exporter.bundle import Bundle


def opener(exported: Path, lowering: str = "grouped") -> OnnxOpener:
    return OnnxOpener(exported / Bundle.open(exported).graph(lowering).file, threads=1)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)


def test_a_graph_is_measured_in_a_process_without_pytorch(
    exported: Path, images: np.ndarray
) -> None:
    recipe = portable(opener(exported))
    assert recipe is not None
    found = measure_memory(recipe, {1: images[:1], 4: images}, threads=1)
    # PyTorch alone would be 200 MB more.
    assert 20 < found.runtime_mb < 180
    assert found.runtime_mb < found.peak_mb[1] <= found.peak_mb[4]


def test_what_fails_in_the_other_process_is_told(exported: Path, images: np.ndarray) -> None:
    recipe = portable(OnnxOpener(exported / "gone.onnx"))
    assert recipe is not None
    with pytest.raises(RuntimeError, match=r"gone\.onnx"):
        measure_memory(recipe, {1: images[:1]})
    assert portable(lambda: None) is None


@pytest.mark.parametrize("lowering", ["grouped", "gather"])
def test_every_layer_has_its_parts(exported: Path, images: np.ndarray, lowering: str) -> None:
    layers = ("blocks.2.mlp", "blocks.3.mlp")
    found = parts_of(opener(exported, lowering), [images[:1], images[1:2]], layers)
    for layer in layers:
        named = {part.part for part in found if part.layer == layer}
        assert named == {"router", "dispatch", "experts", "combine"}
    assert {part.part for part in found if part.layer is None} == {"host", "runtime"}
    assert all(part.ms >= 0 for part in found)


def event(name: str, start: float, end: float, category: str = "Node") -> dict[str, object]:
    return {"name": name, "cat": category, "ts": start, "dur": end - start, "tid": 1}


def test_a_branch_is_not_counted_twice() -> None:
    profile = [
        event("model_run", 0, 100, "Session"),
        event("m/router/top_kernel_time", 0, 100),
        event("model_run", 1000, 2000, "Session"),
        event("m/router/top_kernel_time", 1000, 1100),
        event("m/experts/0_kernel_time", 1100, 1500),
        event("m/experts/0/products_kernel_time", 1150, 1450),
        event("m/combine/C_kernel_time", 1500, 1600),
        event("head_kernel_time", 1600, 1900),
    ]
    found = {(p.layer, p.part): p.ms for p in parts_of_profile(profile, ["m"], skip=1)}
    assert found == pytest.approx(
        {
            ("m", "router"): 0.1,
            ("m", "experts"): 0.4,
            ("m", "combine"): 0.1,
            (None, "host"): 0.3,
            (None, "runtime"): 0.1,
        }
    )


def test_nodes_are_placed_by_their_names() -> None:
    assert place("m/gate.0/products", ["m"]) == ("m", "router")
    assert place("m/group/sorted", ["m"]) == ("m", "experts")
    assert place("m/output", ["m"]) == ("m", "combine")
    assert place("m2/output", ["m"]) == (None, "host")


def alone(logits: np.ndarray, ids: np.ndarray, targets: np.ndarray | None = None) -> Surprise:
    """The sums of the untouched model itself."""
    scored = Sequences.of(logits, ids, targets)
    return Surprise.of(scored, scored)


def test_perplexity_is_that_of_the_next_token() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((3, 5, 7)).astype(np.float32)
    ids = random.integers(0, 7, (3, 5))
    nll = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits[:, :-1]).flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten()
    )
    whole = alone(logits, ids)
    assert (whole.tokens, whole.sequences) == (12, 3)
    found = whole.perplexity(whole)
    assert found.value == pytest.approx(math.exp(float(nll)), rel=1e-6)
    assert found.retention == 1.0
    assert found.interval is not None
    assert found.interval.low < found.value < found.interval.high
    parts = alone(logits[:2], ids[:2]) + alone(logits[2:], ids[2:])
    assert parts.nll == pytest.approx(whole.nll)
    targets = np.full_like(ids, -1)
    targets[:, :-1] = ids[:, 1:]
    assert alone(logits, ids, targets) == whole
    with pytest.raises(FeedError, match="vocabulary"):
        alone(logits[:, :2], ids)


def test_even_guesses_have_the_perplexity_of_the_vocabulary() -> None:
    found = alone(np.zeros((2, 4, 11), np.float32), np.zeros((2, 4), np.int64))
    assert found.perplexity(found).value == pytest.approx(11)


def test_the_interval_of_kept_perplexity_covers_what_is_kept_of_all_text() -> None:
    """Short texts are drawn from a long one; 95% of the intervals should hold its true value."""
    random = np.random.default_rng(0)
    texts, length = 4000, 6
    targets = random.integers(0, 9, (texts, length))
    hard = random.standard_normal((texts, length, 9)) * random.uniform(0.2, 4, (texts, 1, 1))
    other = hard + 0.5 * random.standard_normal(hard.shape)
    base, worse = (Sequences.of(each, targets, targets) for each in (hard, other))
    truth = math.exp((base.nll.sum() - worse.nll.sum()) / base.tokens.sum())
    covered, widths, unpaired = 0, [], []
    for drawn in random.integers(0, texts, (300, 60)):
        before, now = (Sequences(s.nll[drawn], s.tokens[drawn]) for s in (base, worse))
        found = Surprise.of(now, before).perplexity(Surprise.of(before, before))
        assert found.interval is not None
        assert found.retention_interval is not None
        low, high = found.retention_interval.low, found.retention_interval.high
        assert low < found.retention < high
        covered += low <= truth <= high
        widths.append(high / low)
        unpaired.append(found.interval.high / found.interval.low)
    assert 0.90 <= covered / 300 <= 0.98
    assert np.median(widths) < np.median(unpaired)


def test_a_model_keeps_exactly_its_own_perplexity() -> None:
    random = np.random.default_rng(0)
    own = alone(random.standard_normal((3, 5, 7)), random.integers(0, 7, (3, 5)))
    assert own.perplexity(own).retention_interval == Interval(1.0, 1.0)


def test_wilson_intervals_are_those_of_the_tables() -> None:
    found = wilson(15, 50)
    assert (found.low, found.high) == pytest.approx((0.1910, 0.4375), abs=1e-4)
    assert wilson(50, 50).high == 1.0
    assert wilson(50, 50).low == pytest.approx(0.9287, abs=1e-4)
    assert wilson(0, 50).low == 0.0


def test_the_interval_of_a_ratio_uses_that_the_samples_are_the_same() -> None:
    close = paired_ratio(90, 100, 90)
    far = paired_ratio(90, 100, 80)
    assert close is not None
    assert far is not None
    assert far.low < close.low < 0.9 < close.high < far.high
    assert paired_ratio(0, 10, 0) is None
    same = paired_ratio(360, 360, 360)
    assert same is not None
    assert same.low < 1 < same.high


@pytest.mark.skipif(KINDS["pytorch-compile"].missing() is not None, reason="no C++ compiler")
def test_a_compiled_model_computes_batches_of_any_size() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU()).requires_grad_(False)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    compiled = CompiledPyTorch(module, (2,))
    np.testing.assert_allclose(compiled(x), PyTorch(module)(x), rtol=1e-5, atol=1e-6)


def test_engines_that_are_not_there_are_named_with_the_reason() -> None:
    selection = select(parse_engines("onnxruntime"))
    assert [kind.name for kind in selection.present] == ["pytorch-eager", "onnxruntime"]
    reasons = {each.engine: each.reason for each in selection.absent}
    assert reasons["pytorch-algorithm-2"] == "not asked for: --engine pytorch-algorithm-2"
    assert set(reasons) | {"pytorch-eager", "onnxruntime"} == set(KINDS)
    assert "tensorrt" in reasons
    with pytest.raises(UsageError, match="--engine tvm: there is no such engine"):
        parse_engines("onnxruntime,tvm")
    assert parse_engines("all") == tuple(KINDS)
