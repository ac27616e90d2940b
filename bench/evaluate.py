"""One pass over the data: accuracy or perplexity, routing and parity of every case."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..common.console import Progress, Silent
from ..data.feeds import IGNORED, Array, Labels, check_classes
from ..errors import FeedError, in_one_line
from ..exporter.bundle.parity_record import TIE, Tolerance
from ..exporter.inputs import Inputs
from .data import Labelled
from .engines import ModelEngine, engine_of
from .metrics import (
    ClassCounts,
    NegativeLogLikelihood,
    ParityStatistics,
    RoutingOverlap,
    SequenceLosses,
    Sums,
    TopKCounts,
)
from .plan import Candidate, Case
from .runners.base import Runner, first_of
from .runners.models import reference_of
from .runners.pytorch import Expected, PyTorch, outputs_of, untouched

SAVE_S = 10.0  # how often the sums so far are kept for a run that goes on after a kill

OUTPUT_BYTES = 256 << 20
"""Outputs of one batch may take this much; token models give a vocabulary per token."""


LEAST_COSINE = {"int8": 0.8, "fp8": 0.8, "int4": 0.8}
FLOAT_COSINE = 0.99
"""With a smaller cosine to PyTorch's outputs, those of a case are another function's: rounding in
its precision does not turn them so far, nor do other experts that it chooses."""

LEAST_ROUTING = 0.9
"""Of an FP32 graph's inputs, or tokens, so many choose as PyTorch does, but for ties."""


@dataclass(frozen=True, slots=True)
class QualitySums(Sums):
    """The running sums of one case, from which its quality follows."""

    top_k: TopKCounts = field(default_factory=TopKCounts)
    classes: ClassCounts = field(default_factory=ClassCounts)
    nll: NegativeLogLikelihood = field(default_factory=NegativeLogLikelihood)
    routing: RoutingOverlap = field(default_factory=RoutingOverlap)
    parity: ParityStatistics = field(default_factory=ParityStatistics)


def wrong(case: Case, sums: QualitySums, bounds: Tolerance | None) -> str | None:
    """Returns why outputs are not those of PyTorch in a case's precision; None where they are.

    Of a graph that moexport made, `bounds` are those that `verify` has for it.
    """
    cosine = sums.parity.parity().cosine
    least = LEAST_COSINE.get(case.precision, FLOAT_COSINE)
    if cosine < least:
        return (
            f"wrong outputs: their cosine to PyTorch's with the same k is {cosine:.3f}, and "
            f"{least} is the least for {case.precision}"
        )
    if bounds is None:
        return None
    routing, fp32 = sums.routing, bounds.routing == 1.0
    other = routing.exact < LEAST_ROUTING * routing.samples or not sums.parity.same
    if fp32 and routing.samples and other:
        share = min(routing.exact / routing.samples, sums.parity.same / sums.parity.outputs)
        return f"wrong experts: they are PyTorch's in {share:.0%}, and ties are rare in FP32"
    off = sums.parity.off(bounds)
    if off is None:
        return None
    return (
        f"wrong outputs: where the experts are PyTorch's they are {off:.2g} off, and "
        f"{bounds.rtol:g} is the most for {case.precision}"
    )


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """How far an evaluation is: samples seen, the untouched model's sums, everyone's by label."""

    seen: int = 0
    untouched: QualitySums = field(default_factory=QualitySums)
    sums: dict[str, QualitySums] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def quality(self, case: Case) -> dict[str, Any]:
        """Returns how good a case is that did not fail, as those fields of its rows.

        `routing` is None where there is nothing to compare: in PyTorch, and where all experts are
        kept.
        """
        sums, base = self.sums[case.label], self.untouched
        return {
            "accuracy": sums.top_k.accuracy(base.top_k) if sums.top_k.seen else None,
            "losing": sums.classes.losing(base.classes),
            "perplexity": sums.nll.perplexity(base.nll) if sums.nll.tokens else None,
            "routing": sums.routing.agreement() if sums.routing.samples else None,
            "parity": sums.parity.parity(),
        }

    def __add__(self, later: EvaluationState) -> EvaluationState:
        """The state after the samples of both; of a case that failed the first reason."""
        sums = dict(self.sums)
        for label, more in later.sums.items():
            sums[label] = sums.get(label, QualitySums()) + more
        return EvaluationState(
            self.seen + later.seen,
            self.untouched + later.untouched,
            sums,
            later.failures | self.failures,
        )


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

    One pass over the first `limit` samples, in batches of at most `batch`: of whole ones alone
    where a candidate's graphs have one size, so that the last samples may be left out. The
    reference of a case is PyTorch with its k: the untouched model for k = n, Algorithm 1 by masking
    for fewer, and the model whose routers choose so many; the edited model where graphs are edited.
    An interrupted pass goes on from `state`,
    as it was handed to `keep` now and then. Raises FeedError when PyTorch cannot run the data.
    """
    progress = progress or Silent()
    state = state or EvaluationState()
    known = data.samples
    total = known if known is None or limit is None else min(known, limit)
    batches = _batches(runners, candidate, data, batch, limit)
    only, what = candidate.only_batch, f"{candidate.name}: accuracy, routing and parity"
    if only is not None and total is not None and total % only:
        what += f" of {total - total % only} inputs: {total % only} more are no batch of {only}"
    progress.step(what, total=total or limit)
    progress.advance(state.seen)
    done, saved = 0, time.monotonic()
    for size, after in batches:
        done += size
        if done <= state.seen:
            continue
        state = after(state)
        progress.advance(size)
        if time.monotonic() - saved > SAVE_S:
            keep(state)
            saved = time.monotonic()
    keep(state)
    return state


def evaluate_share(
    runners: Mapping[Case, Runner],
    candidate: Candidate,
    data: Labelled,
    batch: int,
    *,
    limit: int | None,
    share: tuple[int, int],
) -> dict[int, EvaluationState]:
    """Returns the sums of some batches, each apart by its number: of every s-th, from the i-th on.

    `share` is (i, s). The states of all batches, added in their order, are what `evaluate` returns.
    """
    first, step = share
    batches = enumerate(_batches(runners, candidate, data, batch, limit))
    return {
        number: after(EvaluationState()) for number, (_, after) in batches if number % step == first
    }


def _batches(
    runners: Mapping[Case, Runner],
    candidate: Candidate,
    data: Labelled,
    batch: int,
    limit: int | None,
) -> Iterator[tuple[int, Callable[[EvaluationState], EvaluationState]]]:
    """Yields the size of each batch of an evaluation, and what adds its sums to a state."""
    model, name = candidate.model, candidate.name
    base = untouched(model)
    references = {
        k: reference_of(candidate, k)
        for k in sorted({c.k for c in runners if _has_own_reference(c, candidate)})
    }
    first = data.head(1)
    if not len(first):
        raise FeedError("the data hold no samples", hint="give at least one input")
    only, most = candidate.only_batch, sys.maxsize if limit is None else limit
    if only is not None and (held := min(most, len(data.head(only)))) < only:
        raise FeedError(
            f"{name} runs batches of {only} inputs alone, and {held} are measured",
            hint=f"give {only} inputs or more",
        )
    rows = only or candidate.model.batch_of
    output = data.output
    nbytes = outputs_of(base, first.batch(0, rows), name, output).nbytes // rows
    fitting = max(1, OUTPUT_BYTES // max(1, nbytes))
    foretells = len(model.inputs) == 1 or model.host.benchmark(model) is not None
    judge = _Judge(foretells, model.input.below, output)

    def after(state: EvaluationState, inputs: Inputs, labels: Labels | None) -> EvaluationState:
        x = np.ascontiguousarray(inputs) if isinstance(inputs, np.ndarray) else inputs
        dense = outputs_of(base, x, name, output)
        return _after(state, runners, dense, references, x, labels, judge)

    for inputs, labels in data.stream(only or min(batch, fitting), limit):
        # What depends on its batch is the same function only of whole ones.
        if only in (None, len(first_of(inputs))):
            yield len(first_of(inputs)), partial(after, inputs=inputs, labels=labels)


def _is_untouched(case: Case) -> bool:
    """Whether a case runs the model as it was trained."""
    kind = engine_of(case.engine, case.provider)
    return isinstance(kind, ModelEngine) and kind.untouched


def _has_own_reference(case: Case, candidate: Candidate) -> bool:
    """Whether what a case computes is another model than the untouched one."""
    if _is_untouched(case):
        return False
    layers = candidate.model.layers
    fewer = any(k < layers[n].spec.experts for n, k in candidate.k_by_layer(case.k).items())
    edited = bool(candidate.model.edits)
    return fewer or case.k < case.experts or case.k in candidate.routed or edited


@dataclass(frozen=True, slots=True)
class _Judge:
    """How outputs are judged: by the class of an input or token, or by how they foretell tokens.

    `foretells` says whether the outputs are of the tokens after those of the input, of which there
    are `vocabulary`, where the model tells it. Of several outputs it is the one of that number.
    """

    foretells: bool
    vocabulary: int | None
    output: int

    def scores(self, outputs: Array, x: Array, labels: Labels | None) -> Array | SequenceLosses:
        """What is judged: outputs, or the losses of the tokens that they foretell."""
        ids = x.dtype.kind in "iu" and x.ndim == 2
        tokens = ids and outputs.ndim == 3 and (labels is None or labels.ndim == 2)
        if tokens and self.foretells and self.vocabulary in (None, outputs.shape[-1]):
            return SequenceLosses.of(outputs, x, labels)
        return outputs

    def judged(
        self, scores: Array | SequenceLosses, labels: Labels | None, base: Array | SequenceLosses
    ) -> QualitySums:
        """Accuracy where there are classes, perplexity of tokens; beside the untouched model's."""
        if isinstance(scores, SequenceLosses) and isinstance(base, SequenceLosses):
            return QualitySums(nll=NegativeLogLikelihood.of(scores, base))
        if labels is None or not (isinstance(scores, np.ndarray) and isinstance(base, np.ndarray)):
            return QualitySums()
        if labels.ndim == 1:
            top_k = TopKCounts.of(scores, labels, base)
            return QualitySums(top_k=top_k, classes=ClassCounts.of(scores, labels))
        counted = labels != IGNORED  # a class for each token
        return QualitySums(top_k=TopKCounts.of(scores[counted], labels[counted], base[counted]))


def _after(
    state: EvaluationState,
    runners: Mapping[Case, Runner],
    dense: Array,
    references: Mapping[int, PyTorch],
    x: Inputs,
    labels: Labels | None,
    judge: _Judge,
) -> EvaluationState:
    """The state after one more batch, of which the untouched model gives `dense`."""
    main = first_of(x)
    if labels is not None and labels.ndim == 1:
        check_classes(labels, dense.shape[-1], "the data", first=state.seen)
    scores = judge.scores(dense, main, labels)
    expected = {k: reference.with_routing(x, judge.output) for k, reference in references.items()}
    sums, failures = dict(state.sums), dict(state.failures)
    for case, runner in runners.items():
        if case.label in failures:
            continue
        reference = None if _is_untouched(case) else expected.get(case.k)
        wanted = reference or Expected(dense, {}, {})
        try:
            actual = runner.infer(x, judge.output)
            chosen = _compared(runner, x, wanted)
            alike = _alike(chosen, wanted, actual.shape)
            own = replace(
                judge.judged(judge.scores(actual, main, labels), labels, scores),
                routing=_overlap(chosen, wanted),
                parity=ParityStatistics.of(actual, wanted.outputs, alike),
            )
        except Exception as error:  # noqa: BLE001  the row says what failed; the others go on
            failures[case.label] = in_one_line(error)
        else:
            sums[case.label] = sums.get(case.label, QualitySums()) + own
    base = state.untouched + judge.judged(scores, labels, scores)
    return EvaluationState(state.seen + len(main), base, sums, failures)


def _compared(runner: Runner, x: Inputs, expected: Expected) -> dict[str, Array] | None:
    """The experts that a graph chose, of the layers that choose in PyTorch; None if not told."""
    chosen = runner.selected(x) if expected.chosen else None
    if chosen is None:
        return None
    return {n: s for n, s in chosen.items() if n in expected.chosen}


def _overlap(chosen: Mapping[str, Array] | None, expected: Expected) -> RoutingOverlap:
    """How far the experts that a graph chose are those that PyTorch's layers chose.

    Ties are those of FP32 in any precision: what a precision changes beyond is its own doing.
    """
    if chosen is None:
        return RoutingOverlap()
    return RoutingOverlap.of(chosen, expected.chosen, expected.margins, TIE)


def _alike(
    chosen: Mapping[str, Array] | None, expected: Expected, output: tuple[int, ...]
) -> Array | None:
    """Which inputs [b], or tokens [b, m], of an output chose as PyTorch does in every layer.

    None where nothing is chosen. Where that is not told, none of them is known to.
    """
    if not expected.chosen:
        return None
    alike = np.zeros(output[:1], dtype=bool)
    if chosen is None or chosen.keys() != expected.chosen.keys():
        return alike
    same = [(np.sort(chosen[n]) == np.sort(s)).all(axis=-1) for n, s in expected.chosen.items()]
    if len({len(layer) for layer in same}) > 1 or len(same[0]) % output[0]:
        return alike
    equal: Array = np.logical_and.reduce(same).reshape(output[0], -1)
    if equal.shape == output[:2] and len(output) > equal.ndim:
        return equal
    return np.asarray(equal.all(axis=1))
