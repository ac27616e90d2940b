"""One pass over the data: accuracy or perplexity, routing and parity of every case."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..calibration.feeds import Array, Labels, check_classes
from ..common.console import Progress, Silent
from ..common.timing import in_one_line
from ..errors import FeedError
from .cases import Candidate, Case
from .data import Labelled
from .metrics import (
    NegativeLogLikelihood,
    ParityStatistics,
    RoutingOverlap,
    SequenceLosses,
    TopKCounts,
)
from .results import PYTORCH_COMPILE, PYTORCH_EAGER, Accuracy, Parity, Perplexity, RoutingAgreement
from .runners.base import Runner
from .runners.pytorch import PyTorch, outputs_of, untouched, with_algorithm_1

SAVE_S = 10.0
"""How often the sums so far are kept for a run that goes on after a kill."""

UNTOUCHED = (PYTORCH_EAGER, PYTORCH_COMPILE)
"""Engines that run the model as it was trained."""

OUTPUT_BYTES = 256 << 20
"""Outputs of one batch may take this much; token models give a vocabulary per token."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How good a case is, whatever the batch size it is timed at.

    `routing` is None where there is nothing to compare: in PyTorch, and where all experts are kept.
    """

    accuracy: Accuracy | None
    perplexity: Perplexity | None
    routing: RoutingAgreement | None
    parity: Parity


@dataclass(frozen=True, slots=True)
class QualitySums:
    """The running sums of one case, from which its quality follows."""

    top_k: TopKCounts = field(default_factory=TopKCounts)
    nll: NegativeLogLikelihood = field(default_factory=NegativeLogLikelihood)
    routing: RoutingOverlap = field(default_factory=RoutingOverlap)
    parity: ParityStatistics = field(default_factory=ParityStatistics)

    def __add__(self, other: QualitySums) -> QualitySums:
        return QualitySums(
            self.top_k + other.top_k,
            self.nll + other.nll,
            self.routing + other.routing,
            self.parity + other.parity,
        )

    def quality(self, untouched: QualitySums) -> Quality:
        """Returns what the sums say beside those of the untouched model."""
        return Quality(
            self.top_k.accuracy(untouched.top_k) if self.top_k.seen else None,
            self.nll.perplexity(untouched.nll) if self.nll.tokens else None,
            self.routing.agreement() if self.routing.samples else None,
            self.parity.parity(),
        )


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """How far an evaluation is: samples seen, the untouched model's sums, everyone's by label."""

    seen: int = 0
    untouched: QualitySums = field(default_factory=QualitySums)
    sums: dict[str, QualitySums] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def quality(self, case: Case) -> Quality:
        """Returns the quality of a case that did not fail."""
        return self.sums[case.label].quality(self.untouched)


def evaluate(
    runners: Mapping[Case, Runner],
    candidate: Candidate,
    data: Labelled,
    batch: int,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
    state: EvaluationState | None = None,
    keep: Callable[[EvaluationState], None] = lambda state: None,
) -> EvaluationState:
    """Returns the sums of each case of a candidate, and in words what others failed at.

    One pass over the first `limit` samples, in batches of at most `batch`. The reference of a
    case is PyTorch with its k: the untouched model for k = n, Algorithm 1 by masking for
    fewer; the edited model where the graphs are edited. An interrupted pass goes on from `state`,
    as it was handed to `keep` now and then. Raises FeedError when PyTorch cannot run the data.
    """
    progress = progress or Silent()
    state = state or EvaluationState()
    references = _References.of(candidate, runners)
    known = data.samples
    total = known if known is None or limit is None else min(known, limit)
    progress.step(f"{candidate.name}: accuracy, routing and parity", total=total or limit)
    progress.advance(state.seen)
    done, saved = 0, time.monotonic()
    for x, labels in data.stream(min(batch, references.fitting(data)), limit):
        done += len(x)
        if done <= state.seen:
            continue
        state = _after(state, runners, references, np.ascontiguousarray(x), labels)
        progress.advance(len(x))
        if time.monotonic() - saved > SAVE_S:
            keep(state)
            saved = time.monotonic()
    if not state.seen:
        raise FeedError("the data hold no samples", hint="give at least one input")
    keep(state)
    return state


@dataclass(frozen=True, slots=True)
class _References:
    """What the cases of a candidate are compared with: PyTorch, untouched and by k."""

    name: str
    untouched: PyTorch
    by_k: Mapping[int, PyTorch]

    @staticmethod
    def of(candidate: Candidate, runners: Mapping[Case, Runner]) -> _References:
        """With all experts the untouched model is the reference, unless the model is edited."""
        model, edited = candidate.model, bool(candidate.model.edits)
        return _References(
            candidate.name,
            untouched(model),
            {
                k: with_algorithm_1(model, k, "masked", renormalize=candidate.renormalize)
                for k in sorted({c.k for c in runners if c.k < c.experts or edited})
            },
        )

    def outputs(self, x: Array) -> Array:
        """Returns the untouched model's outputs; FeedError where it cannot run the inputs."""
        return outputs_of(self.untouched, x, self.name)

    def fitting(self, data: Labelled) -> int:
        """How many samples a batch may hold so that its outputs are not too large."""
        first = data.head(1)
        if not len(first):
            return 1
        return max(1, OUTPUT_BYTES // max(1, self.outputs(first.inputs).nbytes))


def _after(
    state: EvaluationState,
    runners: Mapping[Case, Runner],
    references: _References,
    x: Array,
    labels: Labels | None,
) -> EvaluationState:
    """The state after one more batch."""
    dense = references.outputs(x)
    if labels is not None and labels.ndim == 1:
        check_classes(labels, dense.shape[-1], "the data", first=state.seen)
    scores = _scores(dense, x, labels)
    expected = {k: reference.with_routing(x) for k, reference in references.by_k.items()}
    sums, failures = dict(state.sums), dict(state.failures)
    for case, runner in runners.items():
        if case.label in failures:
            continue
        reference = None if case.engine in UNTOUCHED else expected.get(case.k)
        outputs, chosen = reference or (dense, {})
        try:
            actual = runner.infer(x)
            found = replace(
                _judged(_scores(actual, x, labels), labels, scores),
                routing=_overlap(runner, x, chosen),
                parity=ParityStatistics.of(actual, outputs),
            )
        except Exception as error:  # noqa: BLE001  the row says what failed; the others go on
            failures[case.label] = in_one_line(error)
        else:
            sums[case.label] = sums.get(case.label, QualitySums()) + found
    return EvaluationState(
        seen=state.seen + len(x),
        untouched=state.untouched + _judged(scores, labels, scores),
        sums=sums,
        failures=failures,
    )


def _scores(outputs: Array, x: Array, labels: Labels | None) -> Array | SequenceLosses:
    """What outputs are judged by: themselves, or how they foretell tokens where both are tokens."""
    tokens = x.dtype.kind in "iu" and outputs.ndim == 3 and (labels is None or labels.ndim == 2)
    return SequenceLosses.of(outputs, x, labels) if tokens else outputs


def _judged(
    scores: Array | SequenceLosses, labels: Labels | None, untouched: Array | SequenceLosses
) -> QualitySums:
    """Accuracy where there are classes, perplexity of tokens; beside the untouched model's."""
    if isinstance(scores, SequenceLosses) and isinstance(untouched, SequenceLosses):
        return QualitySums(nll=NegativeLogLikelihood.of(scores, untouched))
    if (
        labels is None
        or isinstance(scores, SequenceLosses)
        or isinstance(untouched, SequenceLosses)
    ):
        return QualitySums()
    return QualitySums(top_k=TopKCounts.of(scores, labels, untouched))


def _overlap(runner: Runner, x: Array, expected: Mapping[str, Array]) -> RoutingOverlap:
    """How far the experts that a graph chose are those `expected` [b, k] of each layer."""
    chosen = runner.selected(x) if expected else None
    if chosen is None:
        return RoutingOverlap()
    return RoutingOverlap.of({n: s for n, s in chosen.items() if n in expected}, expected)
