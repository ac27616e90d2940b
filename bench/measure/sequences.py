"""The door for how models of sequences are measured: their outputs foretell the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...common.registry import Registry
from ...data.feeds import Array
from ...exporter.inputs import Inputs
from ...exporter.model import Model
from ..data import LabelledData
from ..plan import Phase
from ..runners.pytorch import PyTorch


@dataclass(frozen=True, slots=True)
class SequenceBenchmark:
    """How a benchmark measures the models whose `Host.benchmark` names it.

    `data` returns sequences of what was asked for, for a prompt of so many tokens (None: its own
    number); `phases` the calls that are timed, of such a prompt where sequences have a length; and
    `inputs` what a call takes of some sequences, with what the untouched model has in its cache.
    """

    name: str
    data: Callable[[str | Path | Array | None, Model, int | None], LabelledData]
    phases: Callable[[Model, int | None, int], tuple[Phase, ...]]
    inputs: Callable[[Phase, Inputs, PyTorch], dict[str, Array]]


BENCHMARKS = Registry("moexport.benchmarks", SequenceBenchmark)
"""All are plugins'."""


def benchmark_of(model: Model) -> SequenceBenchmark | None:
    """Returns how a model of sequences is measured; None for all others."""
    name = model.host.benchmark(model)
    return None if name is None else BENCHMARKS[name]


def phase_inputs(model: Model, phase: Phase, x: Inputs, base: PyTorch) -> dict[str, Array]:
    """Returns what a call of a model of sequences takes of some."""
    benchmark = benchmark_of(model)
    assert benchmark is not None, "only models of sequences are timed in phases"
    return benchmark.inputs(phase, x, base)
