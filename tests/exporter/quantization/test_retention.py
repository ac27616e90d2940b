"""What FP32 answers on a feed, and how much of it something else retains, by every measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.common.console import Silent
from moexport.data.batches import Feed
from moexport.errors import FeedError, UsageError
from moexport.exporter.job import export_job
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.exporter.options import ExportOptions
from moexport.exporter.quantization.accuracy_search import (
    SAMPLES,
    ReferenceOutputs,
    reference_outputs,
)
from moexport.graphs.sizes import parse_range
from torch import Tensor, nn

VOCABULARY, WIDTH = 7, 3


class TokenScores(nn.Module):
    """Token t gets the highest score for t, of [b, m, vocabulary]."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.eye(VOCABULARY)[ids]


class Same(nn.Module):
    """Gives what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


TOKENS = Model(
    *(TokenScores(), "test", {}, Source("tokens", ())),
    (TensorSpec("input", "int64", ("batch", "tokens"), below=VOCABULARY),),
    (TensorSpec("output", "float32", ("batch", "tokens", VOCABULARY)),),
)
IDS = np.arange(24).reshape(6, 4) % VOCABULARY


def same(*axes: str | int) -> Model:
    spec = TensorSpec("input", "float32", ("batch", *axes))
    return Model(Same(), "test", {}, Source("same", ()), (spec,), (spec,))


def answers(model: Model, data: Feed, folder: Path, batch: str = "1:1:32") -> ReferenceOutputs:
    options = ExportOptions(batch=parse_range(batch, "--batch"))
    return reference_outputs(export_job(model, options, data=data), folder, Silent())


def scores(ids: np.ndarray) -> np.ndarray:
    return np.asarray(np.eye(VOCABULARY)[ids])


def test_tokens_without_targets_agree_by_position(tmp_path: Path) -> None:
    found = answers(TOKENS, IDS, tmp_path)
    assert (found.measure, found.samples) == ("agreement", 6)
    assert found.retention(scores) == 1

    def last_is_zero(ids: np.ndarray) -> np.ndarray:
        return scores(np.concatenate([ids[:, :-1], 0 * ids[:, -1:]], axis=1))

    wrong = (IDS[:, -1] != 0).sum()
    assert found.retention(last_is_zero) == pytest.approx(1 - wrong / IDS.size)


def test_targets_of_tokens_count_but_for_the_ignored(tmp_path: Path) -> None:
    targets = IDS.copy()
    targets[:, 0] = -1  # nothing is to be foretold there
    targets[:, 1] = (IDS[:, 1] + 1) % VOCABULARY  # FP32 is wrong
    found = answers(TOKENS, [(IDS[:2], targets[:2]), (IDS[2:], targets[2:])], tmp_path)
    assert found.measure == "accuracy"
    assert found.retention(scores) == 1
    assert found.retention(lambda ids: scores((ids + 1) % VOCABULARY)) == pytest.approx(0.5)


def test_what_is_not_finite_is_wrong(tmp_path: Path) -> None:
    x = np.eye(4, dtype=np.float32)
    found = answers(same(4), x, tmp_path)
    broken = x.copy()
    broken[0, 1] = np.nan
    broken[1, 1] = np.inf
    assert found.retention(lambda _: broken) == 0.5


def test_outputs_that_are_no_classes_are_compared_by_their_direction(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 5, WIDTH)).astype(np.float32)
    x[0] = 0
    found = answers(same("tokens", WIDTH), {"feed": x}.values(), tmp_path)
    assert found.measure == "cosine"
    assert found.retention(lambda part: 2 * part) == pytest.approx(1)
    assert found.retention(lambda part: -part) == pytest.approx((1 - 39) / 40)
    assert found.retention(lambda part: part + np.nan) == 0


def test_one_number_per_token_is_compared_by_its_direction(tmp_path: Path) -> None:
    port = TensorSpec("input", "int64", ("batch", "tokens"), below=VOCABULARY)
    output = TensorSpec("output", "float32", ("batch", "tokens", 1))
    value = nn.Embedding(VOCABULARY, 1, _weight=torch.arange(1.0, VOCABULARY + 1)[:, None])
    model = Model(value, "test", {}, Source("values", ()), (port,), (output,))
    found = answers(model, IDS, tmp_path)
    assert found.measure == "cosine"
    assert found.retention(lambda ids: ids[..., None] + 1.0) == pytest.approx(1)


def test_a_fixed_batch_takes_whole_batches(tmp_path: Path) -> None:
    x = np.eye(5, 4, dtype=np.float32)
    assert [len(part) for part in answers(same(4), x, tmp_path, "2").inputs()] == [2, 2]
    with pytest.raises(FeedError, match="no batch of 8 inputs"):
        answers(same(4), x, tmp_path, "8")


def test_a_long_feed_is_not_read_to_its_end(tmp_path: Path) -> None:
    read = 0

    def feed() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal read
        while True:
            read += 100
            yield np.ones((100, 2), np.float32), np.zeros(100, int)

    assert answers(same(2), feed(), tmp_path).samples == SAMPLES
    assert read < SAMPLES + 200


def test_one_number_an_input_cannot_be_judged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one number per input"):
        answers(same(1), np.ones((3, 1), np.float32), tmp_path)


def test_a_label_for_a_sequence_is_none_for_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match=r"shape \(6,\) do not fit outputs of shape \(6, 4, 7\)"):
        answers(TOKENS, [(IDS, np.zeros(6, int))], tmp_path)
