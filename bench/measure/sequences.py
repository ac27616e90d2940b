"""The registry of benchmarks for models of sequences, whose outputs predict the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...common.registry import Registry
from ...data.batches import Array
from ...exporter.inputs import Inputs
from ...exporter.model import Model
from ..data import LabelledData
from ..plan import Phase
from ..runners.pytorch import PyTorch, untouched


@dataclass(frozen=True, slots=True)
class SequenceBenchmark:
    """How a benchmark measures the models whose `Host.benchmark` names it.

    `data` returns sequences for a request and a prompt length in tokens (None: the default);
    `phases` returns the timed calls for such a prompt and a sequence length; `inputs` returns
    the inputs of a call for some sequences, with the unmodified model's cache.
    """

    name: str
    data: Callable[[str | Path | Array | None, Model, int | None], LabelledData]
    phases: Callable[[Model, int | None, int], tuple[Phase, ...]]
    inputs: Callable[[Phase, Inputs, PyTorch], dict[str, Array]]


BENCHMARKS = Registry("moexport.benchmarks", SequenceBenchmark)
"""Every sequence benchmark comes from a plugin."""


def benchmark_of(model: Model) -> SequenceBenchmark | None:
    """Returns how a model of sequences is measured; None for other models."""
    name = model.host.benchmark(model)
    return None if name is None else BENCHMARKS[name]


def phase_inputs(model: Model, phase: Phase, x: Inputs) -> dict[str, Array]:
    """Returns the inputs of one call of a sequence model."""
    benchmark = benchmark_of(model)
    assert benchmark is not None, "only models of sequences are timed in phases"
    return benchmark.inputs(phase, x, untouched(model))
