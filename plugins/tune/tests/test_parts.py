"""The parts of a search: even halves, paired intervals, the path, and which experts go first."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.bench.runners.base import first_of
from moexport.common.text import parse_seconds, parse_share, parse_size
from moexport.errors import UsageError
from moexport.plugins.tune.accuracy.confirm import front_of
from moexport.plugins.tune.accuracy.holdout import Holdout
from moexport.plugins.tune.accuracy.quality import Metric, Quality, Tally, metric_for
from moexport.plugins.tune.recipe import LayerRecipe
from moexport.plugins.tune.schedule import Option, predicted_front, steps
from moexport.plugins.tune.space import Point, Trial, ks_of, sizes_to_measure
from moexport.plugins.tune.substitutes.constants import removal_order
from moexport.plugins.tune.times import FormTime, LayerTimes


def test_the_halves_are_even_apart_and_whole() -> None:
    count = 5001  # more than are drawn at once
    data = LabelledData(np.arange(count, dtype=np.float32)[:, None], np.arange(count))
    holdout = Holdout.of(data)
    searched = holdout.search.inputs[:, 0].astype(int)
    confirming = np.concatenate([first_of(x)[:, 0] for x, _ in holdout.confirming()]).astype(int)
    assert not {*searched} & {*confirming}
    assert sorted([*searched, *confirming]) == list(range(count))
    assert holdout.confirming_count == len(confirming)
    # One of every pair of neighbours: data in any order are halved alike.
    assert np.bincount(searched // 2, minlength=2500)[:2500].tolist() == [1] * 2500
    assert holdout.search.labels is not None
    assert holdout.search.labels.tolist() == searched.tolist()


def test_fewer_inputs_have_the_same_halves() -> None:
    def searched(count: int) -> list[float]:
        data = LabelledData(np.arange(count, dtype=np.float32)[:, None], None)
        return [*map(float, Holdout.of(data).search.inputs[:, 0])]

    assert searched(4200)[: len(searched(100))] == searched(100)


def scores(right: np.ndarray) -> np.ndarray:
    """Class scores [b, 2] of which class 1 wins where `right`."""
    return np.stack([1.0 - right, right], axis=1).astype(np.float32)


def test_what_is_kept_is_paired_input_by_input() -> None:
    labels = np.ones(1000, np.int64)
    base = np.ones(1000)
    base[:100] = 0
    own = base.copy()
    own[100:110] = 0  # ten of the untouched model's correct answers
    metric = Metric("accuracy")
    x = np.zeros((1000, 1), np.float32)
    quality = metric.quality(metric.tally(scores(own), scores(base), x, labels))
    assert quality.kept == pytest.approx(890 / 900)
    # Unpaired, 1,000 inputs give no more than ±3%.
    assert 0.975 < quality.low < quality.kept < quality.high < 1.0
    same = metric.quality(metric.tally(scores(base), scores(base), x, labels))
    assert same.kept == 1
    assert same.low < 1


def test_a_function_scores_inputs_and_its_ratio_has_an_interval() -> None:
    metric = Metric("function", lambda y, labels: y[:, 0].astype(float), "own:score")
    random = np.random.default_rng(0)
    base = random.uniform(1, 2, (400, 2)).astype(np.float32)
    own = base * np.float32(0.98)
    quality = metric.quality(metric.tally(own, base, base, None))
    assert quality.kept == pytest.approx(0.98, abs=1e-4)
    assert 0.97 < quality.low < quality.kept < quality.high


def test_sums_of_batches_are_those_of_all() -> None:
    metric, random = Metric("accuracy"), np.random.default_rng(1)
    base, own = (random.standard_normal((64, 5)).astype(np.float32) for _ in range(2))
    labels, x = random.integers(0, 5, 64), np.zeros((64, 1), np.float32)
    parts = Tally()
    for rows in (slice(0, 10), slice(10, 64)):
        parts += metric.tally(own[rows], base[rows], x[rows], labels[rows])
    whole = metric.tally(own, base, x, labels)
    for name in ("inputs", "own", "base", "both", "shift"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))


def test_token_models_are_judged_by_perplexity() -> None:
    random = np.random.default_rng(2)
    ids = random.integers(0, 7, (20, 9))
    base = random.standard_normal((20, 9, 7)).astype(np.float32)
    metric = metric_for(None, base, ids, None)
    assert metric.name == "perplexity"
    same = metric.quality(metric.tally(base, base, ids, None))
    assert same.kept == pytest.approx(1.0)
    worse = metric.quality(metric.tally(-base, base, ids, None))
    assert worse.kept < 1.0 or worse.kept > 1.0
    assert worse.low < worse.kept < worse.high


def test_the_inputs_that_must_confirm_are_enough_where_all_agree() -> None:
    metric = Metric("accuracy")
    needed = metric.needed(0.99, 0.9)
    assert needed is not None
    right = np.ones(needed)
    right[: math.ceil(needed / 10)] = 0
    x, labels = np.zeros((needed, 1), np.float32), np.ones(needed, np.int64)
    quality = metric.quality(metric.tally(scores(right), scores(right), x, labels))
    assert quality.low == pytest.approx(0.99, abs=2e-4)


def test_the_path_takes_what_loses_least_for_its_gain_first() -> None:
    def options(*pairs: tuple[float, float]) -> list[Option]:
        return [
            Option(LayerRecipe(8 - index), cost, shift) for index, (cost, shift) in enumerate(pairs)
        ]

    start = Point((("a", LayerRecipe(8)), ("b", LayerRecipe(8))), "ort-cpu")
    listed = {
        "a": options((4.0, 0.0), (3.0, 0.1), (2.0, 0.15), (1.0, 5.0)),  # the second is no corner
        "b": options((4.0, 0.0), (1.0, 0.3)),
    }
    points = [tuple(choice.k for _, choice in point.layers) for point in steps(start, listed)]
    assert points == [(6, 8), (6, 7), (5, 7)]


def test_the_predicted_front_is_that_of_all_combinations() -> None:
    random = np.random.default_rng(3)
    options = {
        part: [
            Option(LayerRecipe(9 - index), cost, shift)
            for index, (cost, shift) in enumerate([(1.0, 0.0), *random.random((count, 2)).tolist()])
        ]
        for part, count in (("a", 5), ("b", 7), ("c", 4))
    }
    start = Point(tuple((part, LayerRecipe(9)) for part in options), "ort-cpu")
    sums = {
        tuple(each.choice.k for each in row if isinstance(each.choice, LayerRecipe)): (
            sum(each.cost for each in row),
            sum(each.shift for each in row),
        )
        for row in itertools.product(*options.values())
    }
    wanted = {
        row: one
        for row, one in sums.items()
        if not any(o[0] <= one[0] and o[1] <= one[1] and o != one for o in sums.values())
    }
    front = predicted_front(start, options)
    found = {tuple(c.k for _, c in each.point.layers): (each.cost, each.shift) for each in front}
    assert len(wanted) > 5
    assert found.keys() == wanted.keys()
    assert all(found[row] == pytest.approx(wanted[row]) for row in wanted)
    assert [each.cost for each in front] == sorted((c for c, _ in wanted.values()), reverse=True)
    # Every step of the path is on it.
    assert {tuple(c.k for _, c in p.layers) for p in steps(start, options)} <= {*wanted}


def trial(ms: float, kept: float, low: float = 0.0) -> Trial:
    point = Point((("a", LayerRecipe(round(1000 * ms))),), "ort-cpu")
    return Trial(point, {}, Quality(kept, low, 1.0, 0.0, 100), ms, ms, 10)


def test_the_front_holds_what_nothing_beats() -> None:
    trials = [trial(3.0, 1.0), trial(2.0, 0.9), trial(1.0, 0.95), trial(0.5, 0.5)]
    assert [each.ms for each in front_of(trials)] == [3.0, 1.0, 0.5]


def test_experts_go_in_the_order_of_what_is_missing_without_them() -> None:
    # Experts 1 and 2 cancel each other: without both nothing is missing.
    added = torch.tensor([[1.0, 0.0], [3.0, 0.0], [-3.0, 0.0], [0.0, 2.0]]).double()
    order = removal_order(added @ added.T)
    assert order[0] == 0
    assert {*order} == {0, 1, 2, 3}
    assert order[-1] != 0


def of_times() -> tuple[LayerTimes, Point]:
    """Two layers alike, alone 1 ms each with one lowering and 1.5 or 4 with others."""
    times = LayerTimes("ort-cpu")
    for name in ("a", "b"):
        times.forms[name, (8, 0, "fp32")] = FormTime(1.0, "dense", {"gather": 1.5, "fused": 4.0})
        times.forms[name, (4, 0, "fp32")] = FormTime(0.5, "gather")
    return times, Point((("a", LayerRecipe(8)), ("b", LayerRecipe(8))), "ort-cpu")


def test_a_smaller_size_that_was_measured_as_slower_is_taken_to_be_hardly_faster() -> None:
    times = LayerTimes("ort-cpu")
    # To compute all 8 is faster than to choose 6 of them, and stays so.
    for k, found in ((8, 1.5), (6, 2.0), (4, 3.0), (2, 1.0)):
        times.forms["a", (k, 0, "fp32")] = FormTime(found, f"{k}")
    known = [times.form_time("a", LayerRecipe(k)) for k in (8, 7, 6, 5, 4, 3, 2)]
    ms = [each.ms for each in known if each is not None]
    assert ms == pytest.approx([1.5, 2.0, 2.5, 2.5, 2.5, 1.75, 1.0], rel=1e-3)
    assert ms[2] > ms[3] > ms[4]
    assert [each.lowering for each in known if each is not None] == list("8866442")


def test_a_whole_graph_corrects_the_times_of_single_layers() -> None:
    times, point = of_times()
    times.corrected(point, 5.0)
    assert times.predicted_ms(point) == pytest.approx(5.0)
    smaller = times.predicted_ms(point.with_layer("a", LayerRecipe(4)))
    times.corrected(point, 6.0)  # the time around them is known now
    assert times.predicted_ms(point) == pytest.approx(6.0)
    assert times.predicted_ms(point.with_layer("a", LayerRecipe(4))) > smaller


def test_a_whole_graph_that_computes_some_experts_corrects_what_computes_some_alone() -> None:
    times, point = of_times()
    times.corrected(point, 5.0)
    fewer = Point((("a", LayerRecipe(4)), ("b", LayerRecipe(4))), "ort-cpu")
    times.corrected(fewer, 8.0)
    assert times.predicted_ms(fewer) == pytest.approx(8.0)
    assert times.predicted_ms(point) == pytest.approx(5.0)
    mixed = point.with_layer("a", LayerRecipe(4))
    assert times.predicted_ms(mixed) == pytest.approx((5.0 + 8.0) / 2)
    times.corrected(mixed, 100.0)  # it is unknown which of the two this corrects
    assert times.predicted_ms(mixed) == pytest.approx((5.0 + 8.0) / 2)


def test_a_graph_that_is_faster_than_its_layers_alone_leaves_no_negative_time() -> None:
    times, point = of_times()
    times.corrected(point, 1.2)
    assert times.predicted_ms(point) == pytest.approx(1.2)
    assert 0 < times.predicted_ms(point.with_layer("a", LayerRecipe(4))) < 1.2


def test_lowerings_that_may_be_as_fast_in_a_whole_graph_are_tried_in_layers_alike_together() -> (
    None
):
    times, point = of_times()
    first = {"a": "dense", "b": "dense"}
    assert times.lowering_variants(point, first) == [first, {"a": "gather", "b": "gather"}]
    mixed = point.with_layer("b", LayerRecipe(4))
    chosen = {"a": "dense", "b": "gather"}
    assert times.lowering_variants(mixed, chosen) == [chosen, {"a": "gather", "b": "gather"}]


def test_the_largest_subset_is_timed_itself() -> None:
    listed = [LayerRecipe(k) for k in ks_of(64)]
    listed += [LayerRecipe(size, experts=tuple(range(size))) for size in ks_of(64)[1:]]
    timed = sizes_to_measure(listed)
    assert LayerRecipe(45, experts=tuple(range(45))) in timed
    assert len(timed) < len(listed)


def test_agreement_of_token_models_counts_the_tokens_of_each_sequence() -> None:
    random = np.random.default_rng(3)
    ids, base = random.integers(0, 7, (50, 9)), np.zeros((50, 9, 7), np.float32)
    base[..., 0] = 1.0
    own = base.copy()
    own[:, :3, 1] = 2.0  # a third of the tokens of each
    metric = metric_for("agreement", base, ids, None)
    assert metric.tokens
    quality = metric.quality(metric.tally(own, base, ids, None))
    assert quality.kept == pytest.approx(2 / 3)
    assert quality.low < 2 / 3 < quality.high
    assert metric.quality(metric.tally(base, base, ids, None)).kept == 1.0


def test_numbers_of_experts_are_two_to_a_halving() -> None:
    assert ks_of(5) == (5, 4, 3, 2, 1)
    assert ks_of(64) == (64, 45, 32, 23, 16, 11, 8, 6, 4, 3, 2, 1)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (parse_share("99%", "--keep"), 0.99),
        (parse_share(0.9, "--keep"), 0.9),
        (parse_seconds("5ms", "--max-latency", "ms"), 0.005),
        (parse_seconds("5", "--max-latency", "ms"), 0.005),
        (parse_seconds("10min", "--time", "s"), 600.0),
        (parse_size("1.5MB", "--max-bytes"), 1_500_000),
        (parse_size("2GiB", "--max-bytes"), 2 << 30),
        (parse_size("2GB", "--workspace"), 2_000_000_000),
        (parse_size("512m", "--workspace"), 512 << 20),
    ],
)
def test_what_is_typed_is_understood(found: float, wanted: float) -> None:
    assert found == pytest.approx(wanted)


def test_accuracy_without_labels_is_refused() -> None:
    outputs = np.zeros((8, 4), np.float32)
    with pytest.raises(UsageError, match="no labels"):
        metric_for("accuracy", outputs, np.zeros((8, 3), np.float32), None)
