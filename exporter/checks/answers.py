"""A model's results on a user's data: its accuracy, and how far it is from the user's own model.

A checkpoint has no code: "PyTorch" is the network that moexport builds from it and the settings.
With a wrong setting this is another network, but every graph still agrees with it. This shows in
the accuracy on labels, and in a comparison with the user's own outputs (an array `output`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data.batches import LABEL, OUTPUT, Feed, Fields, rebatched, row_count
from ...errors import FeedError, ParityError
from ..bundle.parity import ROUNDED_RTOL, TOLERANCES, Tolerance
from ..reference import EXACT_BYTES, Network, releasing_pages, run_untouched, weights_bytes
from .accuracy import (
    COUNT,
    MAX_CHANGED,
    Score,
    agreeing_inputs,
    arrays_of,
    check_own,
    distances,
    epsilon,
    fields_of,
    is_images_or_text,
    labelled_output,
    no_accuracy,
    output_names,
    score,
)

if TYPE_CHECKING:
    from ..model import Model

BATCH = 16

ROUNDINGS = TOLERANCES["fp32"].roundings
"""How many times as far from float64 as PyTorch's float32 the user's outputs may be."""

SMALL = 1e-2
"""Below this share of max|y|, a difference may be due to arithmetic or a minor setting."""


@dataclass(frozen=True, slots=True)
class OwnOutputs:
    """How far a rebuilt model is from the user's own model's outputs for the same inputs.

    `max_rel` is relative to max|y| of the same input. `roundings` is the user's distance from
    float64 over that of the rebuilt model, None if unknown. `tied` counts the inputs that were not
    compared, because rounding may change a choice; `agreeing` those with the same largest output.
    """

    inputs: int
    max_abs: float
    max_rel: float
    wrong: int
    tied: int = 0
    agreeing: int | None = None
    roundings: float | None = None

    @property
    def text(self) -> str:
        """In words: how far apart they are."""
        text = f"max |difference| {self.max_abs:.2g} ({self.max_rel:.2g} of max|y|)"
        text += f" over {self.inputs:,} inputs"
        return text + (f", {self.tied} of them tied and not compared" if self.tied else "")


@dataclass(frozen=True, slots=True)
class Answers:
    """A model's results on a feed that has labels, or outputs of the user's own model, or both.

    `accuracy` is PyTorch's and `own_accuracy` that of the outputs in the feed; None if there are
    no labels, or the outputs are not class scores. `notes` are further remarks for the user.
    """

    own: OwnOutputs | None = None
    accuracy: Score | None = None
    own_accuracy: Score | None = None
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        scores = {"pytorch": self.accuracy, "own": self.own_accuracy}
        found: dict[str, Any] = {
            name: asdict(score) for name, score in scores.items() if score is not None
        }
        if self.own is not None:
            own = asdict(self.own)
            found["own_outputs"] = {
                key: own[key] for key in ("inputs", "max_abs", "max_rel", "tied")
            }
        return found


def answer_sentences(answers: Answers, model: Model) -> list[str]:
    """Returns sentences on PyTorch's results: accuracy, and whether they equal the user's own."""
    found = [*answers.notes]
    if answers.accuracy is not None:
        own = answers.own_accuracy
        before = "" if own is None else f"your own outputs {own.text}, "
        found.append(f"accuracy on labelled inputs: {before}PyTorch {answers.accuracy.text}")
    return found + what_pytorch_is(answers, model)


def what_pytorch_is(answers: Answers, model: Model) -> list[str]:
    """Returns a sentence on "PyTorch" and the user's own model, unless they are the same code."""
    if answers.own is not None:
        return [f"PyTorch gives the same outputs as your own model: {answers.own.text}"]
    return [] if model.host.own_code else [WHAT_PYTORCH_IS]


WHAT_PYTORCH_IS = (
    "PyTorch is the network that is built from the checkpoint and its settings; to compare it with "
    "your own model, add that model's outputs for the inputs to --data, as an array 'output'"
)


def answers_of(
    model: Model,
    data: Feed | None,
    *,
    count: int | None = None,
    batch: int | None = None,
    fixed: Mapping[str, int] | None = None,
    bounds: Tolerance | None = None,
    own_bounds: bool = False,
) -> Answers | None:
    """Returns a model's results on the first `count` inputs of a feed.

    None if it has neither labels nor outputs of the user's own model. `batch` is the only batch
    size of the network, if it has one, and `fixed` are the sizes of axes. The outputs may differ by
    `ROUNDINGS`, or by `bounds` if these are the user's `own_bounds` or float64 is unusable. Raises
    `ParityError` if the user's own outputs in the feed differ from those of the rebuilt model by
    more than rounding, and `FeedError` for arrays that cannot be such outputs.
    """
    if data is None or is_images_or_text(data):
        return None
    fields = fields_of(model, data, COUNT if count is None else count)
    first = next(fields, None)
    if first is None or not ({LABEL, *output_names(model)} & first.keys()):
        return None
    tolerance = bounds or TOLERANCES["fp32"]
    if model.rounded:
        tolerance = replace(tolerance, rtol=max(tolerance.rtol, ROUNDED_RTOL))
    rounding = not own_bounds and not model.rounded
    group = batch or model.batch_of
    size = group * max(1, BATCH // group)
    labelled = output_names(model)[labelled_output(model, data)]
    results = _Results(model, labelled, tolerance, rounding)
    for part in rebatched(_with_equal_fields(first, fields), size):
        rows = row_count(part) // group * group
        if rows:
            results.add({name: array[:rows] for name, array in part.items()}, fixed)
    if not results.inputs:
        return None
    answers = results.answers()
    if answers.own is not None and answers.own.wrong:
        raise _disagreement(model, answers, results, option=bounds is not None)
    return answers


def check_own_outputs(model: Model, data: Feed | None) -> None:
    """Raises what `answers_of` raises, if a feed has outputs of the user's own model."""
    if data is None or isinstance(data, np.ndarray | Iterator) or is_images_or_text(data):
        return
    first = next(fields_of(model, data, 1), {})
    if {*output_names(model)} & first.keys():
        answers_of(model, data)


def _with_equal_fields(first: Fields, rest: Iterator[Fields]) -> Iterator[Fields]:
    """Yields all batches, with the fields of the first one."""
    yield first
    for fields in rest:
        missing = next((name for name in first if name not in fields), None)
        if missing is not None:
            raise FeedError(
                f"--data: some batches have '{missing}', but others do not",
                hint="give it with all of them, or with none",
            )
        yield {name: fields[name] for name in first}


@dataclass(slots=True)
class _Results:
    """The results of the batches so far."""

    model: Model
    labelled: str
    bounds: Tolerance
    rounding: bool
    """Whether outputs may differ by rounding alone, according to float64."""
    inputs: int = 0
    accuracy: Score = Score()
    own_accuracy: Score = Score()
    some_labels: bool = False
    scored: bool = True
    own: OwnOutputs | None = None
    others: dict[str, None] = field(default_factory=dict)
    """The names of outputs that differ from the user's, in their order."""
    probabilities: bool = True
    """Whether the user's outputs are the softmax of ours, or its logarithm."""

    def add(self, part: Fields, fixed: Mapping[str, int] | None) -> None:
        outputs = output_names(self.model)
        theirs = {name: part.pop(name) for name in outputs if name in part}
        labels = part.pop(LABEL, None)
        x = arrays_of(part, self.model, fixed)
        with releasing_pages(self.model):
            ours = dict(zip(outputs, run_untouched(self.model, x), strict=True))
        self.inputs += row_count(x)
        self.scored &= labels is not None
        name = self.labelled
        if labels is not None:
            self.some_labels = True
            found = score(ours[name], labels)
            self.scored &= found is not None
            self.accuracy += found or Score()
            own = score(theirs[name], labels) if name in theirs else None
            self.own_accuracy += own or Score()
        if theirs:
            self._compare(x, theirs, ours)

    def _compare(self, x: Fields, theirs: Fields, ours: Fields) -> None:
        rows = row_count(x)
        apart_in: dict[str, np.ndarray] = {}
        max_abs = max_rel = 0.0
        ratio: float | None = None
        exact: dict[str, np.ndarray] | None = None
        for name, array in theirs.items():
            check_own(array, ours[name], name)
            if ours[name].dtype.kind != "f":
                share = (array != ours[name]).reshape(rows, -1).mean(axis=1)
                apart_in[name] = share > MAX_CHANGED
                continue
            off, largest = distances(array, ours[name])
            if exact is None:
                values = _exact_outputs(self.model, x) if self.rounding else None
                exact = {} if values is None else dict(zip(ours, values, strict=True))
            allowed = self.bounds.atol + (self.bounds.rtol + epsilon(array)) * largest
            if name in exact:
                # How far PyTorch's float32 is from float64: at least the last bit.
                rounding = max(
                    _max_share(*distances(ours[name], exact[name])), float(np.finfo(np.float32).eps)
                )
                apart, _ = distances(array, exact[name])
                allowed = (ROUNDINGS * rounding + epsilon(array)) * largest
                apart_in[name] = ~(apart <= allowed)
                ratio = max(ratio or 0.0, _max_share(apart, rounding * largest))
            else:
                apart_in[name] = ~(off <= allowed)
            max_abs, max_rel = max(max_abs, off.max()), max(max_rel, _max_share(off, largest))
            self.probabilities &= _is_softmax(array, ours[name])
        wrong = np.logical_or.reduce([*apart_in.values()])
        tied = wrong & _tied_inputs(self.model, x) if wrong.any() else np.zeros(rows, dtype=bool)
        self.others |= {name: None for name, flags in apart_in.items() if (flags & ~tied).any()}
        first = ours[next(iter(theirs))]
        classes = first.ndim > 1 and first.shape[-1] > 1
        agreeing = agreeing_inputs(theirs, ours) if classes else None
        before = self.own or OwnOutputs(0, 0.0, 0.0, 0, agreeing=0)
        self.own = OwnOutputs(
            inputs=before.inputs + rows,
            max_abs=max(before.max_abs, float(max_abs)),
            max_rel=max(before.max_rel, max_rel),
            wrong=before.wrong + int((wrong & ~tied).sum()),
            tied=before.tied + int(tied.sum()),
            agreeing=None
            if agreeing is None or before.agreeing is None
            else before.agreeing + agreeing,
            roundings=before.roundings if ratio is None else max(before.roundings or 0.0, ratio),
        )

    def answers(self) -> Answers:
        scored = self.scored and self.accuracy.of > 0
        return Answers(
            own=self.own,
            accuracy=self.accuracy if scored else None,
            own_accuracy=self.own_accuracy if scored and self.own_accuracy.of else None,
            notes=(no_accuracy(self.labelled),) if self.some_labels and not scored else (),
        )


def _exact_outputs(model: Model, x: Fields) -> list[np.ndarray] | None:
    """Returns the untouched model's results in float64; None if it does not run in float64."""
    if weights_bytes(model) > EXACT_BYTES:
        return None
    try:
        values = Network(model, model.untouched, exact=True).outputs(x)
    except Exception:  # noqa: BLE001  a network may insist on float32: the result is then unknown
        return None
    exact = all(y.dtype != np.float32 and np.isfinite(y).all() for y in values)
    return values if exact else None


def _tied_inputs(model: Model, x: Fields) -> np.ndarray:
    """Returns the inputs [b] for which rounding may change the choices of the untouched model."""
    ours = model.module if model.as_trained is None else model.as_trained
    trained = replace(model, module=ours, as_trained=None)
    kept = trained.trained_k
    rows = row_count(x)
    tied = np.zeros(rows, dtype=bool)
    for _, margin in Network(trained, ours, kept).compute(x).choices.values():
        if len(margin) % rows == 0:
            tied |= (margin.reshape(rows, -1) <= TOLERANCES["fp32"].tie).any(axis=1)
    return tied


def _max_share(off: np.ndarray, scale: np.ndarray) -> float:
    """Returns the largest of some distances, as shares of the scales."""
    return float((off / np.where(scale > 0, scale, 1.0)).max(initial=0.0))


def _is_softmax(theirs: np.ndarray, ours: np.ndarray) -> bool:
    powers = np.exp(np.asarray(ours, np.float64) - ours.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)
    logarithms = np.log(np.maximum(shares, np.finfo(np.float64).tiny))
    return any(np.allclose(theirs, wanted, atol=1e-3) for wanted in (shares, logarithms))


def _disagreement(model: Model, answers: Answers, found: _Results, *, option: bool) -> ParityError:
    """Returns the error for a network that differs from the user's; `option`: bounds can be set."""
    own = answers.own
    assert own is not None
    settings = _settings(model)
    built = f"built from it and its settings ({settings})" if settings else "built from it"
    share = ""
    if own.roundings is not None and own.max_rel < SMALL:
        share = (
            f", {own.roundings:.0f} times as far from float64 as PyTorch's float32 is, but at most "
            f"{ROUNDINGS:g} times is allowed: a minor setting may be wrong (norm_eps, "
            "act_layer), or yours were computed with less precision"
        )
    if own.agreeing is not None:
        share += f"; the largest output is the same in {own.agreeing:,} of them"
    named = ", ".join(f"'{name}'" for name in found.others)
    which = f" {named}" if len(output_names(model)) > 1 else ""
    text = (
        f"{model.source.path}: the network {built} gives outputs{which} that differ from your own "
        f"model's in {own.wrong:,} of {own.inputs:,} inputs of --data: {own.text}{share}"
    )
    if answers.accuracy is not None and answers.own_accuracy is not None:
        text += (
            f"; its accuracy is {answers.accuracy.text}, that of your outputs "
            f"{answers.own_accuracy.text}"
        )
    if found.probabilities:
        hint = "yours are the softmax of these: save the logits, before the softmax"
    else:
        hint = (
            "correct the settings with --set or --config, or the array, which should have the "
            "outputs of model.eval() for these inputs in float32 on a CPU"
        )
        hint += (
            "; --rtol 1e-3 accepts outputs of a GPU"
            if option
            else f"; without the array '{OUTPUT}' nothing is compared"
        )
    return ParityError(text, hint=hint)


def _settings(model: Model) -> str:
    """Returns the settings that shapes do not determine, with the values in use."""
    from ..families import FAMILIES  # only needed for an error

    questions = FAMILIES[model.family].questions if model.family in FAMILIES else model.config
    values = {key: model.config[key] for key in questions if key in model.config}
    return ", ".join(f"{key}={value}" for key, value in values.items())
