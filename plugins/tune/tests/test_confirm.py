"""What is confirmed: the interval covers, the orders are fixed before, and together they err in 5%.

The results of both halves are drawn independently here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from moexport.bench.metrics import score_interval
from moexport.plugins.tune.accuracy.confirm import (
    ConfirmationOrders,
    Confirmed,
    orders_of,
    passing,
    worth_confirming,
)
from moexport.plugins.tune.accuracy.quality import Quality
from moexport.plugins.tune.recipe import LayerRecipe
from moexport.plugins.tune.space import Point, Trial

KEEP, RIGHT = 0.99, 430
"""The share to keep, and the number of inputs that at least one of two models answers correctly."""


def trial(ms: float, kept: float = 1.0, low: float = 0.99, shift: float = 0.0) -> Trial:
    point = Point((("a", LayerRecipe(round(1000 * ms))),), "ort-cpu")
    return Trial(point, {}, Quality(kept, low, 1.0, shift, 100), ms, ms, 10)


def confirmed(low: float, *, promising: bool = False) -> Confirmed:
    return Confirmed(trial(1.0), Quality(1.0, low, 1.0, 0.0, 100), promising)


def passes(lost: int, won: int) -> bool:
    return score_interval(RIGHT - lost - won, lost, won).low >= KEEP


@pytest.mark.parametrize("lost", [0.01, 0.011, 0.013, 0.02, 0.04])
def test_a_model_that_keeps_just_less_than_asked_passes_in_one_of_forty_at_the_most(
    lost: float,
) -> None:
    # On the edge: a share of the inputs is lost, and as many won that 99% are kept.
    won = max(0.0, (lost - (1 - KEEP)) / KEEP)
    both, error, seen = 1 - lost - won, 0.0, 0.0
    for b in range(50):
        for c in range(50):
            ways = math.lgamma(RIGHT + 1) - math.lgamma(b + 1) - math.lgamma(c + 1)
            ways -= math.lgamma(RIGHT - b - c + 1)
            if won == 0 and c:
                continue
            chance = math.exp(
                ways
                + b * math.log(lost)
                + (c * math.log(won) if c else 0.0)
                + (RIGHT - b - c) * math.log(both)
            )
            seen += chance
            if KEEP * (RIGHT - c) <= RIGHT - b + 1 and passes(b, c):
                error += chance
    assert seen == pytest.approx(1.0, abs=1e-3)
    assert error <= 0.025


def test_the_first_that_fails_ends_its_sequence_and_not_the_other() -> None:
    conservative = [confirmed(0.995), confirmed(0.98), confirmed(0.999)]
    promising = [
        confirmed(0.993, promising=True),
        confirmed(0.9, promising=True),
        confirmed(0.995, promising=True),
    ]
    assert passing([*conservative, *promising], 0.99) == [conservative[0], promising[0]]
    failed = [confirmed(0.98, promising=True), confirmed(0.995, promising=True)]
    assert passing([*conservative[::2], *failed], 0.99) == conservative[::2]
    assert passing([*conservative, *promising], None) == [*conservative, *promising]


def test_one_noisy_point_before_it_does_not_cost_the_one_that_promises_most() -> None:
    base = trial(10.0)
    safest, noisy, fast, risky = trial(9.0), trial(8.0), trial(2.0), trial(1.9, 0.991, 0.95)
    found = orders_of([noisy, risky, fast, safest], base, KEEP)
    assert found.conservative == (base, safest, noisy)
    assert found.promising == (fast, risky)
    assert found.trials == (base, safest, noisy, fast, risky)
    few = orders_of([noisy, risky, fast, safest], base, KEEP, limit=2)
    assert few == ConfirmationOrders((base,), (fast,))


def test_what_the_search_saw_to_lose_too_much_or_to_be_no_faster_is_not_confirmed() -> None:
    base = trial(1.0)
    assert orders_of([trial(0.5, 0.98, 0.97), trial(1.1)], base, KEEP) == ConfirmationOrders(
        (base,)
    )


def test_where_the_model_as_trained_meets_no_bound_slower_points_that_do_are_confirmed() -> None:
    base, smaller, faster = trial(1.0), trial(1.5), trial(1.2)
    assert orders_of([smaller, faster], base, KEEP) == ConfirmationOrders((base,))
    found = orders_of([smaller, faster], base, KEEP, base_meets=False)
    assert found == ConfirmationOrders((base, smaller), (faster,))
    assert orders_of([smaller], base, KEEP, base_meets=False).promising == (smaller,)


def test_of_points_that_keep_as_much_the_slower_ones_are_confirmed_too() -> None:
    unsure, sure = trial(2.0, 1.0, 0.985), trial(3.0, 1.0, 0.991)
    tied, worse = trial(3.5, 1.0, 0.991, 0.3), trial(4.0, 0.99, 0.98, 0.4)
    assert worth_confirming([worse, tied, sure, unsure]) == [unsure, sure, tied]
    unmoved = trial(5.0, 0.99, 0.98, 0.0)
    assert worth_confirming([unmoved, tied, worse]) == [tied, worse, unmoved][::2]


def test_more_right_answers_than_the_untouched_model_has_do_not_make_a_point_surer() -> None:
    base, lucky, same = trial(16.0), trial(1.0, 1.01, 1.003), trial(8.0, 1.0, 0.993)
    assert worth_confirming([same, lucky]) == [lucky, same]
    found = orders_of([lucky, trial(2.0, 1.02, 1.01), same], base, KEEP)
    assert [each.ms for each in found.conservative] == [16.0, 8.0, 2.0]


def test_where_the_fastest_fails_slower_ones_are_left_at_every_factor_of_time() -> None:
    base = trial(16.0)
    tied = [trial(ms) for ms in (1.0, 1.1, 1.2, 1.3, 2.0, 2.1, 4.0, 4.2, 8.0, 8.1, 15.0)]
    found = orders_of(tied, base, KEEP, limit=5)
    assert [each.ms for each in found.promising] == [1.0]
    assert [each.ms for each in found.conservative] == [16.0, 8.0, 4.0, 2.0]


def test_together_they_pass_a_point_that_keeps_too_little_in_5_percent_at_the_most() -> None:
    # All six points keep a little less than required; some lose the same inputs, others not.
    random = np.random.default_rng(0)
    names, runs, wrong = 6, 3000, 0
    known: dict[tuple[int, int], float] = {}
    base = trial(10.0)
    for _ in range(runs):
        shared = random.random() < 0.5
        lost = 0.0102 + (0.0 if shared else random.choice([0.0, 0.01]))
        won = (lost - 0.0102) / KEEP
        count = 1 if shared else names
        draws = random.multinomial(RIGHT, (lost, won, 1 - lost - won), size=(2, count))
        draws = np.broadcast_to(draws, (2, count, 3)).repeat(names // count, axis=1)
        lows, kept = np.zeros((2, names)), np.zeros((2, names))
        for half, name in np.ndindex(2, names):
            b, c = int(draws[half, name, 0]), int(draws[half, name, 1])
            if (b, c) not in known:
                known[b, c] = score_interval(RIGHT - b - c, b, c).low
            lows[half, name] = known[b, c]
            kept[half, name] = (RIGHT - b) / (RIGHT - c)
        trials = [trial(9.0 - name, kept[0, name], lows[0, name]) for name in range(names)]
        asked = orders_of(trials, base, KEEP)
        at = {each.point.key: name for name, each in enumerate(trials)}
        found = [Confirmed(base, Quality(1.0, 1.0, 1.0, 0.0, RIGHT))]
        for index, each in enumerate(asked.trials[1:], 1):
            name = at[each.point.key]
            quality = Quality(kept[1, name], lows[1, name], 1.0, 0.0, RIGHT)
            found.append(Confirmed(each, quality, index >= len(asked.conservative)))
        wrong += len(passing(found, KEEP)) > 1
    assert wrong / runs <= 0.05
    assert wrong  # the test covers wrong confirmations
