"""One pass over the data: accuracy or perplexity, routing and parity of every case."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ..calibration.feeds import check_classes
from ..common.console import Progress, Silent
from ..common.timing import in_one_line
from ..errors import FeedError
from ..graphs.layers.soft_moe import soft_moe_layers
from .data import Array, Labelled, Labels
from .metrics import Closeness, Hits, Overlap, Sequences, Surprise
from .results import PYTORCH_COMPILE, PYTORCH_EAGER, Accuracy, Parity, Perplexity, RoutingAgreement
from .runners.pytorch import Candidate, Case, Graph, PyTorch, Runner, untouched, with_algorithm_1

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
class Sums:
    """The running sums of one case."""

    hits: Hits = field(default_factory=Hits)
    surprise: Surprise = field(default_factory=Surprise)
    overlap: Overlap = field(default_factory=Overlap)
    closeness: Closeness = field(default_factory=Closeness)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.hits + other.hits,
            self.surprise + other.surprise,
            self.overlap + other.overlap,
            self.closeness + other.closeness,
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Sums:
        """Returns the sums that `asdict` made plain."""
        return cls(
            Hits(**body["hits"]),
            Surprise(**body["surprise"]),
            Overlap(**body["overlap"]),
            Closeness(**body["closeness"]),
        )

    def quality(self, dense: Sums) -> Quality:
        """Returns what the sums say beside those of the untouched model."""
        return Quality(
            self.hits.accuracy(dense.hits) if self.hits.seen else None,
            self.surprise.perplexity(dense.surprise) if self.surprise.tokens else None,
            self.overlap.agreement() if self.overlap.samples else None,
            self.closeness.parity(),
        )


@dataclass(frozen=True, slots=True)
class State:
    """How far an evaluation is: samples seen, the untouched model's sums, everyone's by label."""

    seen: int = 0
    dense: Sums = field(default_factory=Sums)
    sums: dict[str, Sums] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> State:
        """Returns the state that `asdict` made plain."""
        return cls(
            body["seen"],
            Sums.from_json(body["dense"]),
            {label: Sums.from_json(sums) for label, sums in body["sums"].items()},
            dict(body["failures"]),
        )


def evaluate(
    runners: Mapping[Case, Runner],
    candidate: Candidate,
    data: Labelled,
    batch: int,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
    state: State | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda body: None,
) -> tuple[dict[Case, Quality], dict[Case, str]]:
    """Returns the quality of each case of a candidate, and in words what others failed at.

    One pass over the first `limit` samples, in batches of at most `batch`. The reference of a
    case is PyTorch with its k: the untouched model for k = n, Algorithm 1 by masking for
    fewer; the edited model where the graphs are edited. An interrupted pass goes on from `state`;
    what is handed to `keep` now and then makes one. Raises FeedError when PyTorch cannot run the
    data.
    """
    progress = progress or Silent()
    state = state or State()
    base = untouched(candidate.model)
    edited = bool(candidate.model.edits)
    references = _references(candidate, {c.k for c in runners if c.k < c.experts or edited})
    known = data.samples
    total = known if known is None or limit is None else min(known, limit)
    progress.step(f"{candidate.name}: accuracy, routing and parity", total=total or limit)
    progress.advance(state.seen)
    size = min(batch, _fitting(base, data, candidate.name))
    done, saved = 0, time.monotonic()
    for x, labels in data.stream(size, limit):
        done += len(x)
        if done <= state.seen:
            continue
        state = _add(state, runners, x, labels, base, references, candidate.name)
        progress.advance(len(x))
        if time.monotonic() - saved > SAVE_S:
            keep(asdict(state))
            saved = time.monotonic()
    if not state.seen:
        raise FeedError("the data hold no samples", hint="give at least one input")
    keep(asdict(state))
    return (
        {
            c: state.sums[c.label].quality(state.dense)
            for c in runners
            if c.label not in state.failures
        },
        {c: state.failures[c.label] for c in runners if c.label in state.failures},
    )


def _fitting(base: PyTorch, data: Labelled, name: str) -> int:
    """How many samples a batch may hold so that its outputs are not too large."""
    first = data.head(1)
    if not len(first):
        return 1
    return max(1, OUTPUT_BYTES // max(1, _outputs(base, first.inputs, name).nbytes))


def _add(
    state: State,
    runners: Mapping[Case, Runner],
    x: Array,
    labels: Labels | None,
    base: PyTorch,
    references: Mapping[int, PyTorch],
    name: str,
) -> State:
    """The state after one more batch."""
    x = np.ascontiguousarray(x)
    dense = _outputs(base, x, name)
    if labels is not None and labels.ndim == 1:
        check_classes(labels, dense.shape[-1], "the data", first=state.seen)
    scores = _scored(dense, x, labels)
    expected = {k: _expected(reference, x) for k, reference in references.items()}
    sums, failures = dict(state.sums), dict(state.failures)
    for case, runner in runners.items():
        label = case.label
        if label in failures:
            continue
        # With all experts the reference is the untouched model, and nothing is chosen.
        reference = None if case.engine in UNTOUCHED else expected.get(case.k)
        outputs, chosen = reference or (dense, {})
        try:
            found = _sums(runner, x, labels, scores, outputs, chosen)
        except Exception as error:  # noqa: BLE001  the row says what failed; the others go on
            failures[label] = in_one_line(error)
        else:
            sums[label] = sums.get(label, Sums()) + found
    untouched_sums = state.dense + _score(scores, labels, scores)
    return replace(
        state, seen=state.seen + len(x), dense=untouched_sums, sums=sums, failures=failures
    )


def _sums(
    runner: Runner,
    x: Array,
    labels: Labels | None,
    untouched: Array | Sequences,
    expected: Array,
    chosen: Mapping[str, Array],
) -> Sums:
    outputs = runner(x)
    score = _score(_scored(outputs, x, labels), labels, untouched)
    found = replace(score, closeness=Closeness.of(outputs, expected))
    if not (chosen and isinstance(runner, Graph)):
        return found
    selected = runner.selected(x)
    choosing = {name: experts for name, experts in selected.items() if name in chosen}
    return replace(found, overlap=Overlap.of(choosing, chosen))


def _scored(outputs: Array, x: Array, labels: Labels | None) -> Array | Sequences:
    """What outputs are judged by: themselves, or how they foretell tokens where both are tokens."""
    tokens = x.dtype.kind in "iu" and outputs.ndim == 3 and (labels is None or labels.ndim == 2)
    return Sequences.of(outputs, x, labels) if tokens else outputs


def _score(found: Array | Sequences, labels: Labels | None, untouched: Array | Sequences) -> Sums:
    """Accuracy where there are classes, perplexity of tokens; beside the untouched model's."""
    if isinstance(found, Sequences) and isinstance(untouched, Sequences):
        return Sums(surprise=Surprise.of(found, untouched))
    if labels is None or isinstance(found, Sequences) or isinstance(untouched, Sequences):
        return Sums()
    return Sums(hits=Hits.of(found, labels, untouched))


def _references(candidate: Candidate, ks: Iterable[int]) -> dict[int, PyTorch]:
    return {
        k: with_algorithm_1(candidate.model, k, "masked", renormalize=candidate.renormalize)
        for k in sorted(ks)
    }


def _expected(reference: PyTorch, x: Array) -> tuple[Array, dict[str, Array]]:
    """The outputs of a reference, and the experts of the layers that choose among theirs."""
    outputs, chosen = reference.with_routing(x)
    sizes = {name: m.spec.experts for name, m in soft_moe_layers(reference.module).items()}
    return outputs, {name: s for name, s in chosen.items() if s.shape[1] < sizes[name]}


def _outputs(base: PyTorch, x: Array, name: str) -> Array:
    try:
        return base(np.ascontiguousarray(x))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise FeedError(
            f"the PyTorch model {name} cannot run inputs of shape {x.shape}: {error}",
            hint="the data must fit the model that is measured",
        ) from error
