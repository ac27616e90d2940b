"""Runs `tune` for a network of the demo."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from ...bench.data import LabelledData
from ...bench.report.summary import KEPT
from ...common.console import Progress
from ...exporter.bundle.bundle import Bundle
from ..tune.accuracy.holdout import searched
from ..tune.findings import text
from ..tune.request import TuneRequest
from ..tune.tune import search_and_export
from . import digits
from .demo import HELD_OUT, TEST_FILE, TrainedNetwork

SECONDS = 45.0
"""The time limit of the search; a busy machine tries fewer candidates."""


def tuned_bundle(
    progress: Progress, network: TrainedNetwork, directory: Path
) -> tuple[Bundle, str]:
    """Searches for a network's best bundle; returns it, in the demo's folder, and the front.

    The bundle must keep the share of accuracy that the report requires of every row. The search
    uses images that the network was trained on; the report's images, unused until then, confirm it.
    """
    request = TuneRequest(
        keep=KEPT,
        precision="fp32,int8",
        time=SECONDS,
        command=shlex.join(("moexport", "demo", "--data", str(directory / TEST_FILE))),
        force=True,
        progress=progress,
    )
    progress.step(f"tuning {network.name}: {KEPT:.0%} kept")
    data = halves(digits.load_digits(test_share=HELD_OUT))
    tuned = search_and_export(network.load(), data, directory / "tuned", request)
    return tuned.bundle, text(tuned)


def halves(data: digits.Digits) -> LabelledData:
    """Joins the images so that `tune` searches with training images and confirms with others."""
    count = min(len(data.train), len(data.test))
    mine = searched(0, 2 * count)
    assert data.train.labels is not None
    assert data.test.labels is not None
    inputs = np.empty((2 * count, *data.train.inputs.shape[1:]), data.train.inputs.dtype)
    labels = np.empty(2 * count, data.train.labels.dtype)
    for side, of in ((mine, data.train), (~mine, data.test)):
        assert of.labels is not None
        inputs[side], labels[side] = of.inputs[:count], of.labels[:count]
    return LabelledData(inputs, labels, data.test.input_name, data.test.label_name)
