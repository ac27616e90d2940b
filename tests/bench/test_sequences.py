"""A plugin tells how models of sequences are measured: their data, phases and inputs."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.bench.data import LabelledData
from moexport.bench.measure.sequences import BENCHMARKS, SequenceBenchmark, phase_inputs
from moexport.bench.plan import Candidate, Phase
from moexport.bench.prepare import data_of, in_phases
from moexport.bench.request import BenchRequest
from moexport.bench.runners.pytorch import PyTorch
from moexport.common import registry
from moexport.data.batches import Array
from moexport.errors import PluginError, UsageError
from moexport.exporter.inputs import Inputs
from moexport.exporter.model import Host, Model
from moexport.tests.recorded import DATA

API = registry.API
WEIGHTS = DATA / "soft_moe_lucidrains" / "weights.pt"


def sequences(data: str | Path | Array | None, model: Model, tokens: int | None) -> LabelledData:
    del data
    length = 1 + (tokens or 3)
    return LabelledData(np.ones((2, length, 4), np.float32), None, model.input.name)


def phases(model: Model, tokens: int | None, length: int) -> tuple[Phase, ...]:
    del model
    return (Phase("prefill", min(tokens or length, length)),)


def inputs(phase: Phase, x: Inputs, base: PyTorch) -> dict[str, Array]:
    del base
    assert isinstance(x, np.ndarray)
    return {"x": x[:, : phase.tokens]}


MINE = SequenceBenchmark("mine", sequences, phases, inputs)


class Naming(Host):
    def benchmark(self, model: Model) -> str:
        del model
        return MINE.name


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model that names the benchmark of a plugin."""
    point = EntryPoint("mine", f"{__name__}:MINE", BENCHMARKS.group)
    entries = (registry.Entry(point, "theirs 1.5", "", own=False),)
    monkeypatch.setattr(registry, "_found", lambda: entries)
    loaded = moexport.load(WEIGHTS)
    return replace(loaded, source=replace(loaded.source, host=Naming()))


def test_a_model_is_measured_by_the_benchmark_that_it_names(model: Model) -> None:
    data = data_of(model, BenchRequest(tokens=5), {})
    assert data.head(9).inputs.shape == (2, 6, 4)
    (phase,) = in_phases(Candidate("model", model), data, None).phases
    assert phase == Phase("prefill", 6)
    short = in_phases(Candidate("model", model), data, 2).phases[0]
    given = phase_inputs(model, short, data.head(9).inputs)
    assert given["x"].shape == (2, 2, 4)


def test_other_models_have_no_phases_and_take_no_tokens(model: Model) -> None:
    del model
    plain = moexport.load(WEIGHTS)
    data = data_of(plain, BenchRequest(), {"tokens": 4})
    assert in_phases(Candidate("model", plain), data, None).phases == ()
    with pytest.raises(UsageError, match="is not a transformers language model"):
        data_of(plain, BenchRequest(tokens=5), {})


def test_a_benchmark_whose_plugin_is_not_there_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_found", tuple)
    with pytest.raises(PluginError, match="no installed package provides 'mine'"):
        data_of(model, BenchRequest(), {})
