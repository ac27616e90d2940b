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
from ..data.batches import IGNORED, Array, Labels
from ..data.feeds import check_classes
from ..errors import FeedError, one_line
from ..exporter.bundle.parity import TIE, Tolerance
from ..exporter.inputs import Inputs
from .data import Labelled
from .engines import ModelEngine, engine_of
from .measure.answers import AnswerCounts, per_output
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

SAVE_S = 10.0  # seconds between saves of the sums, for resuming after a kill

OUTPUT_BYTES = 256 << 20
"""The largest size of one batch's outputs: language models return a vocabulary per token."""


MIN_COSINE = {"int8": 0.8, "fp8": 0.8, "int4": 0.8}
FLOAT_COSINE = 0.99
"""A smaller cosine with PyTorch's outputs indicates an error: neither rounding in the case's
precision nor a different choice of experts changes outputs by that much."""

MIN_ROUTING = 0.9
"""The share of an FP32 graph's inputs, or tokens, that must choose the same experts as in PyTorch,
apart from ties."""


@dataclass(frozen=True, slots=True)
class QualitySums(Sums):
    """The running sums from which the quality of one case is computed."""

    top_k: TopKCounts = field(default_factory=TopKCounts)
    classes: ClassCounts = field(default_factory=ClassCounts)
    nll: NegativeLogLikelihood = field(default_factory=NegativeLogLikelihood)
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    routing: RoutingOverlap = field(default_factory=RoutingOverlap)
    parity: ParityStatistics = field(default_factory=ParityStatistics)


def deviation_of(case: Case, sums: QualitySums, bounds: Tolerance | None) -> str | None:
    """Returns how outputs differ from PyTorch's by more than a case's precision allows, or None.

    For graphs of moexport, `bounds` are those of `verify`.
    """
    cosine = sums.parity.parity().cosine
    least = MIN_COSINE.get(case.precision, FLOAT_COSINE)
    if cosine < least:
        return (
            f"wrong outputs: their cosine with PyTorch's for the same k is {cosine:.3f}, but "
            f"{case.precision} needs at least {least}"
        )
    if bounds is None:
        return None
    routing, fp32 = sums.routing, bounds.routing == 1.0
    disagrees = routing.exact < MIN_ROUTING * routing.samples or not sums.parity.same
    if fp32 and routing.samples and disagrees:
        share = min(routing.exact / routing.samples, sums.parity.same / sums.parity.outputs)
        return f"wrong experts: only {share:.0%} match PyTorch's, but ties are rare in FP32"
    error = sums.parity.error_beyond(bounds)
    if error is None:
        return None
    return (
        f"wrong outputs: with the same experts they differ from PyTorch's by {error:.2g}, but "
        f"{case.precision} allows at most {bounds.rtol:g}"
    )


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """The state of an evaluation: sample count, and sums of the unmodified model and cases."""

    samples: int = 0
    untouched: QualitySums = field(default_factory=QualitySums)
    sums: dict[str, QualitySums] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def quality(self, case: Case) -> dict[str, Any]:
        """Returns the quality of a successful case, as fields of its rows.

        `routing` is None if there is nothing to compare: in PyTorch, or if all experts are kept.
        """
        sums, base = self.sums[case.label], self.untouched
        by_class = sums.top_k.accuracy(base.top_k) if sums.top_k.samples else None
        return {
            "accuracy": by_class or sums.answers.accuracy(base.answers),
            "regression": sums.answers.regression(),
            "losing": sums.classes.losing(base.classes),
            "perplexity": sums.nll.perplexity(base.nll) if sums.nll.tokens else None,
            "routing": sums.routing.agreement() if sums.routing.samples else None,
            "parity": sums.parity.parity(),
        }

    def __add__(self, later: EvaluationState) -> EvaluationState:
        """Returns the state after the samples of both; a failed case keeps the first reason."""
        sums = dict(self.sums)
        for label, more in later.sums.items():
            sums[label] = sums.get(label, QualitySums()) + more
        return EvaluationState(
            self.samples + later.samples,
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
    """Returns the sums of a candidate's successful cases, and the failures of the others.

    One pass covers the first `limit` samples, in batches of at most `batch`. If a candidate's
    graphs run one batch size, all batches are full, and the last samples may be left out. The
    reference of a case is PyTorch with the same k: the unmodified model for k = n, Algorithm 1 by
    masking for fewer, the model whose routers choose k, or the edited model if graphs are edited.
    An interrupted pass continues from `state`, which `keep` receives regularly. Raises FeedError if
    PyTorch cannot run the data.
    """
    progress = progress or Silent()
    state = state or EvaluationState()
    known = data.samples
    total = known if known is None or limit is None else min(known, limit)
    batches = _batches(runners, candidate, data, batch, limit)
    only, title = candidate.only_batch, f"{candidate.name}: accuracy, routing and parity"
    if only is not None and total is not None and total % only:
        title += (
            f" of {total - total % only} inputs; {total % only} left over: each batch has {only}"
        )
    progress.step(title, total=total or limit)
    progress.advance(state.samples)
    done, saved = 0, time.monotonic()
    for size, add in batches:
        done += size
        if done <= state.samples:
            continue
        state = add(state)
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
    """Returns the states of single batches by index: every s-th, starting with the i-th.

    `share` is (i, s). The sum of all states, in order, equals the result of `evaluate`.
    """
    first, step = share
    batches = enumerate(_batches(runners, candidate, data, batch, limit))
    return {
        number: add(EvaluationState()) for number, (_, add) in batches if number % step == first
    }


def _batches(
    runners: Mapping[Case, Runner],
    candidate: Candidate,
    data: Labelled,
    batch: int,
    limit: int | None,
) -> Iterator[tuple[int, Callable[[EvaluationState], EvaluationState]]]:
    """Yields the size of each batch of an evaluation, and a function that adds it to a state."""
    model, name = candidate.model, candidate.name
    keys = {case: _reference_key(case, candidate) for case in runners}
    references: dict[ReferenceKey, PyTorch] = {}
    for case, key in keys.items():
        source = candidate.for_case(case)
        if key is not None and key not in references and _has_own_reference(case, source):
            references[key] = reference_of(source, case.k)
    first = data.head(1)
    if not len(first):
        raise FeedError("the data contain no samples", hint="give at least one input")
    only, available = candidate.only_batch, sys.maxsize if limit is None else limit
    if only is not None and (found := min(available, len(data.head(only)))) < only:
        raise FeedError(
            f"{name} only runs batches of {only} inputs, but the data have {found}",
            hint=f"give {only} inputs or more",
        )
    evaluator = _Evaluator(
        runners=runners,
        keys=keys,
        references=references,
        base=untouched(model),
        name=name,
        predicts_tokens=len(model.inputs) == 1 or model.host.benchmark(model) is not None,
        vocabulary=model.input.below,
        output=data.output,
    )
    rows = only or model.batch_of
    nbytes = evaluator.untouched_outputs(first.batch(0, rows)).nbytes // rows
    fitting = max(1, OUTPUT_BYTES // max(1, nbytes))
    for inputs, labels in data.stream(only or min(batch, fitting), limit):
        # Results that depend on the batch are only comparable in full batches.
        if only in (None, len(first_of(inputs))):
            yield len(first_of(inputs)), partial(evaluator.add, inputs=inputs, labels=labels)


ReferenceKey = tuple[str, int]
"""The key of a reference: the bundle if its model is edited, and k."""


def _reference_key(case: Case, candidate: Candidate) -> ReferenceKey | None:
    """Returns the key of a case's reference; None if it runs the model as it was trained."""
    kind = engine_of(case.engine, case.provider)
    if isinstance(kind, ModelEngine) and kind.untouched:
        return None
    source = candidate.for_case(case)
    return "" if source is candidate else source.name, case.k


def _has_own_reference(case: Case, candidate: Candidate) -> bool:
    """Returns whether a case computes a model other than the unmodified one."""
    layers = candidate.model.layers
    fewer = any(k < layers[n].spec.experts for n, k in candidate.k_by_layer(case.k).items())
    edited = bool(candidate.model.edits)
    return fewer or case.k < case.experts or case.k in candidate.jobs_by_k or edited


@dataclass(frozen=True, slots=True)
class _Evaluator:
    """Runs and scores batches: by the class of an input or token, or by the predicted tokens.

    `keys` has the key of each case's reference, None for the unmodified model, `base`.
    `predicts_tokens` says whether the outputs predict the next tokens, out of `vocabulary` if the
    model defines it. `output` is the index of the scored output.
    """

    runners: Mapping[Case, Runner]
    keys: Mapping[Case, ReferenceKey | None]
    references: Mapping[ReferenceKey, PyTorch]
    base: PyTorch
    name: str
    predicts_tokens: bool
    vocabulary: int | None
    output: int

    def untouched_outputs(self, x: Inputs) -> Array:
        """Returns the unmodified model's outputs; FeedError if it cannot run the inputs."""
        return outputs_of(self.base, x, self.name, self.output)

    def add(self, state: EvaluationState, inputs: Inputs, labels: Labels | None) -> EvaluationState:
        x = np.ascontiguousarray(inputs) if isinstance(inputs, np.ndarray) else inputs
        main, base_outputs = first_of(x), self.untouched_outputs(x)
        ids = main if main.dtype.kind in "iu" and main.ndim == 2 else None
        if labels is not None and labels.ndim == 1 and per_output(base_outputs, labels) is None:
            check_classes(labels, base_outputs.shape[-1], "the data", first=state.samples)
        base_scores = self._scores(base_outputs, ids, labels)
        expected: dict[ReferenceKey | None, Expected] = {
            key: each.with_routing(x, self.output) for key, each in self.references.items()
        }
        sums, failures = dict(state.sums), dict(state.failures)
        for case, runner in self.runners.items():
            if case.label in failures:
                continue
            reference = expected.get(self.keys[case]) or Expected(base_outputs, {}, {})
            try:
                actual = runner.infer(x, self.output)
                chosen = runner.selected(x) if reference.chosen else None
                routing = RoutingOverlap()
                if chosen is not None:  # compared in the layers that choose in PyTorch
                    chosen = {n: sets for n, sets in chosen.items() if n in reference.chosen}
                    # Ties are those of FP32: other differences count against the precision.
                    routing = RoutingOverlap.of(chosen, reference.chosen, reference.margins, TIE)
                same_choices = _same_choices(chosen, reference, actual.shape)
                scores = self._scores(actual, ids, labels)
                quality = replace(
                    _score(scores, labels, base_scores, ids),
                    routing=routing,
                    parity=ParityStatistics.of(actual, reference.outputs, same_choices),
                )
            except Exception as error:  # noqa: BLE001  recorded in the row; the other cases continue
                failures[case.label] = one_line(error)
            else:
                sums[case.label] = sums.get(case.label, QualitySums()) + quality
        base = state.untouched + _score(base_scores, labels, base_scores, ids)
        return EvaluationState(state.samples + len(main), base, sums, failures)

    def _scores(
        self, outputs: Array, ids: Array | None, labels: Labels | None
    ) -> Array | SequenceLosses:
        """Returns the scored values: outputs, or the losses of the tokens that they predict."""
        tokens = outputs.ndim == 3 and (labels is None or labels.ndim == 2)
        known = self.vocabulary in (None, outputs.shape[-1])
        if ids is not None and tokens and self.predicts_tokens and known:
            return SequenceLosses.of(outputs, ids, labels)
        return outputs


def _score(
    scores: Array | SequenceLosses,
    labels: Labels | None,
    base: Array | SequenceLosses,
    ids: Array | None,
) -> QualitySums:
    """Returns sums for the accuracy of classes or attributes, or the perplexity of tokens."""
    if isinstance(scores, SequenceLosses) and isinstance(base, SequenceLosses):
        return QualitySums(nll=NegativeLogLikelihood.of(scores, base))
    if labels is None or not (isinstance(scores, np.ndarray) and isinstance(base, np.ndarray)):
        return QualitySums()
    numbers = per_output(scores, labels, ids=ids is not None)
    if numbers is not None:
        answers, targets = numbers
        return QualitySums(answers=AnswerCounts.of(answers, targets, base.reshape(answers.shape)))
    if labels.ndim == 1:
        top_k = TopKCounts.of(scores, labels, base)
        return QualitySums(top_k=top_k, classes=ClassCounts.of(scores, labels))
    counted = labels != IGNORED  # a class per token
    return QualitySums(top_k=TopKCounts.of(scores[counted], labels[counted], base[counted]))


def _same_choices(
    chosen: Mapping[str, Array] | None, expected: Expected, output: tuple[int, ...]
) -> Array | None:
    """Marks an output's inputs [b], or tokens [b, m], with PyTorch's experts in every layer.

    Returns None if no layer chooses. If the choices are unknown, no input counts as equal.
    """
    if not expected.chosen:
        return None
    no_match = np.zeros(output[:1], dtype=bool)
    if chosen is None or chosen.keys() != expected.chosen.keys():
        return no_match
    same = [(np.sort(chosen[n]) == np.sort(s)).all(axis=-1) for n, s in expected.chosen.items()]
    if len({len(layer) for layer in same}) > 1 or len(same[0]) % output[0]:
        return no_match
    equal: Array = np.logical_and.reduce(same).reshape(output[0], -1)
    if equal.shape == output[:2] and len(output) > equal.ndim:
        return equal
    return np.asarray(equal.all(axis=1))
