"""Compares an exported graph with its PyTorch model: the values, and what its layers chose.

What PyTorch computed is recorded once (`bundle.parity_record`); the bounds are those of the
precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..common.documents import from_data
from ..errors import BundleError, ParityError
from .bundle.distance import OUTLIERS, Distance, cosines, distance
from .bundle.parity_record import (
    FIRST,
    Reference,
    Rounded,
    by_expert,
    chunks,
    holds_coefficients,
    places,
)
from .inputs import again

if TYPE_CHECKING:
    from ..graphs.targets import Precision
    from .session import GraphSession


ChosenBy = Literal["inputs", "tokens"]

MOST_TIES = 0.75
"""Of the inputs, or of what their tokens choose, so many may differ by ties, and no more: what ties
is not compared."""

FAR = 4.0
"""So many ties are between scores of which no rounding in a batch of another size changes the
order."""

FAR_AT_TOKENS = 12.0
"""The same at another number of tokens, where other tokens are compared. Sound graphs reach 6."""

FLIPS_AT_TOKENS = 3.0
"""Of the choices at another number of tokens so many times the share may differ that may of all,
and one by chance. Sound graphs reach 1.3."""

TIE = 1e-5
"""FP32 scores this close, relative to the k-th, are a tie: rounding may order them either way."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds of a parity check.

    Outputs agree where |difference| ≤ `atol` + `rtol` · max|y|, of each input and each output by
    itself: in their own scale, unless an absolute difference is allowed. One input in twenty may be
    `outlier` times as far off, and none may have a cosine below `least_cosine`.

    `routing` is the least share of inputs in which every layer must choose the same experts. A
    choice between scores that are closer than `tie`, relative to the k-th, is a tie: what comes
    before the layer is rounded, and may order them either way. A muMoE layer's coefficients, which
    sum to 1, are the same choice where none differs by more than `coefficient`; below FP32 only
    those count that one of both has dropped, and `routing` is of tokens.

    A graph is also compared with what its own numbers should give (`Rounded`): it may be
    `roundings` times as far from that as that is from PyTorch. Where that is less than once, the
    last bit of its floats is allowed as well.
    """

    atol: float
    rtol: float
    routing: float
    tie: float
    coefficient: float = 1e-3
    roundings: float = 2.0
    outlier: float = 1.0
    least_cosine: float = 0.99

    def asked(self, atol: float | None, rtol: float | None) -> Tolerance:
        """Returns these bounds with those that a user gives; wider ones allow any direction."""
        atol, rtol = (self.atol if atol is None else atol), (self.rtol if rtol is None else rtol)
        wider = atol > self.atol or rtol > self.rtol
        least = -1.0 if wider else self.least_cosine
        return replace(self, atol=atol, rtol=rtol, least_cosine=least)


def tolerance_of(precision: str) -> Tolerance:
    """Returns the bounds of a precision; of one that is not known, those of FP32."""
    known = (bounds for name, bounds in TOLERANCES.items() if name == precision)
    return next(known, TOLERANCES["fp32"])


def recorded(parity: Mapping[str, Any] | None, precision: str = "fp32") -> Tolerance:
    """Returns the bounds that a manifest's `parity` holds; without one, none may differ.

    What an older one does not hold is that of the precision. Raises `BundleError` for what are no
    bounds.
    """
    bounds = asdict(tolerance_of(precision)) | {"atol": 0.0, "rtol": 0.0}
    return from_data(
        Tolerance, bounds | dict(parity or {}), "manifest.json", at="parity", error=BundleError
    )


_IN_INTEGERS = {"outlier": 3.0, "least_cosine": 0.8}

ROUNDED_RTOL = 1e-3
"""What values on the boundary of a rounding to BF16 may change, in FP32 graphs that do so."""


def recorded_sizes(parity: Mapping[str, Any] | None, name: str) -> list[int]:
    """Returns the sizes that a graph's record of parity holds by a name; none where it has none."""
    sizes = (parity or {}).get(name, ())
    return [size for size in sizes if isinstance(size, int) and size > 0]


TOLERANCES: Mapping[Precision, Tolerance] = MappingProxyType(
    {
        "fp32": Tolerance(atol=0.0, rtol=1e-4, routing=1.0, tie=1e-5, roundings=16.0),
        "fp16": Tolerance(atol=0.0, rtol=1e-2, routing=0.98, tie=1e-3, coefficient=1e-2),
        "bf16": Tolerance(atol=0.0, rtol=5e-2, routing=0.98, tie=8e-3, coefficient=5e-2),
        "int8": Tolerance(
            atol=0.0,
            rtol=1e-1,
            routing=0.98,
            tie=1e-2,
            coefficient=5e-2,
            roundings=1.5,
            **_IN_INTEGERS,
        ),
        "fp8": Tolerance(
            atol=0.0, rtol=2e-1, routing=0.95, tie=2e-2, coefficient=5e-2, **_IN_INTEGERS
        ),
        "int4": Tolerance(
            atol=0.0, rtol=3e-1, routing=0.9, tie=5e-2, roundings=0.25, **_IN_INTEGERS
        ),
    }
)
"""FP32: rounding in another order. FP16 keeps 11 bits and BF16 8, over a network's depth. INT8 has
about 1% of error in each layer, INT4 10%. The ties are what such an error moves a score by.

`roundings`: where each of two graphs rounds values of its own, as 16-bit floats do, and INT8 on
another CPU once some layers have passed on what differs by the last bit, they are √2 times as far
from each other as from what is exact. INT4 rounds weights, which are the same in both. In FP32
PyTorch's own rounding is the measure, and other orders of summing round more or less than that."""


GPU_RTOL = 1e-3
"""FP32 on a GPU: products are summed in another order than PyTorch sums them on a CPU."""


def on_gpu(bounds: Tolerance, precision: str, *, tf32: bool = False) -> Tolerance:
    """Returns the bounds of a comparison that runs on a GPU: the one statement of them.

    FP32 may be `GPU_RTOL` off. TF32 keeps as many bits of a factor as FP16 does, and has its
    bounds. Other precisions round more than any order of summing: theirs are the same everywhere.
    """
    if precision != "fp32":
        return bounds
    half = TOLERANCES["fp16"]
    if tf32:
        return replace(bounds, rtol=max(bounds.rtol, half.rtol), routing=half.routing, tie=half.tie)
    return replace(bounds, rtol=max(bounds.rtol, GPU_RTOL))


@dataclass(frozen=True, slots=True)
class Parity:
    """How far a graph is from its reference.

    `max_abs` is the largest difference of an output where the experts are the same, `max_rel` the
    largest over max|y| of the same input, `cosine` the smallest cosine of a sample's outputs;
    `all_…` are those over all inputs, whatever was chosen. `routing_agreement` is the share of
    samples in which every layer chose the same set, and of a muMoE below FP32 the share of the
    choices that its tokens make: the share `agreeing` of `choices`, `chosen_by` inputs or tokens.
    `ties` counts the samples that differ only where scores were equal up to rounding, `differing`
    all that differ anywhere.
    `first_difference` names the layer where the first wrong set appears. `untouched_cosine`
    compares with the model before Algorithm 1. `jaccard` is the mean overlap of the sets, and
    `flip_margin` the largest margin, relative to the k-th score, of a set that differs (0 where
    none does). `routing` and `tie` are the bounds (`Tolerance`). Records that are older do not tell
    what is None here.
    """

    max_abs: float
    max_rel: float
    cosine: float
    routing_agreement: float
    samples: int
    ties: int
    atol: float
    rtol: float
    passed: bool
    first_difference: str | None
    untouched_cosine: float
    jaccard: float = 1.0
    flip_margin: float = 0.0
    routing: float = 1.0
    tie: float = TIE
    coefficient: float = 1e-3
    roundings: float = 2.0
    compared: int | None = None
    """Inputs of which anything was compared."""
    all_max_abs: float | None = None
    all_max_rel: float | None = None
    all_cosine: float | None = None
    differing: int | None = None
    chosen_by: ChosenBy = "inputs"
    choices: int | None = None
    agreeing: int | None = None
    tied: int = 0
    """Of `choices`, those that differ by a tie: they agree, and nothing of them was compared."""
    batches: tuple[int, ...] = ()
    """The batch sizes at which the graph was compared."""
    outlier: float = 1.0
    least_cosine: float = -1.0
    usual_rel: float | None = None
    """What 95% of the inputs are within, as `max_rel` is."""
    loudness: tuple[float, float] | None = None
    """max|y| of the quietest input that is compared and of the loudest."""
    ks: tuple[int, ...] = ()
    """Each k that was compared, where it is an input of the graph."""
    k: int | None = None
    """The one of `ks` whose figures these are: the furthest off."""
    batch: int | None = None
    """The batch size that misses the bounds where another meets them."""
    token_counts: tuple[int, ...] = ()
    """The numbers of tokens at which the graph was compared, besides those of the inputs."""
    tokens: int | None = None
    """The number of tokens that misses the bounds where another meets them."""
    apart: float | None = None
    """How far the graph is from what its numbers should give (`Rounded`), over how far that is from
    PyTorch."""
    computed_in: str | None = None
    """What the runtime says that it computed matrix products in."""
    whole_differing: float | None = None
    """Of outputs of whole numbers (classes, masks), the share of the numbers that differ."""

    @property
    def mostly_ties(self) -> bool:
        """Whether more was left out as a tie than was compared."""
        return self.choices is not None and self.tied > self.choices / 2


class Comparison:
    """A graph that is compared with its reference, some inputs at a time.

    `selected_values` names the graph's value that holds a layer's chosen experts, for the layers
    that choose. `batch` should differ from the size that was traced. The first of the inputs are
    compared in batches of each size of `probed`, too: a size that was frozen in the trace, or
    anything else that depends on the batch, is right in one of them at most. Inputs of which so
    many are computed `together` stay so there.
    """

    def __init__(
        self,
        session: GraphSession,
        selected_values: Mapping[str, str],
        *,
        batch: int,
        tolerance: Tolerance,
        k: int | None = None,
        probed: Sequence[int] = (),
        together: int = 1,
    ) -> None:
        self._session, self._values = session, selected_values
        self._batch, self._tolerance, self._k = batch, tolerance, k
        self._together = together
        self._results: list[_PartResult] = []
        self._probed = tuple(size for size in probed if size != batch)
        self._probes: dict[int, _PartResult] = {}
        self._sized: dict[int, _PartResult] = {}
        self._first: Reference | None = None
        self._worst: Reference | None = None
        self._furthest = 0.0
        self._at_other_k: dict[int, Comparison] = {}

    def add(self, expected: Reference) -> None:
        """Runs the graph on the reference's inputs, with each k that it holds outputs of."""
        result = self._compared(expected, self._batch)
        furthest = result.everything.max_rel
        if self._first is None or furthest > self._furthest:
            self._worst, self._furthest = expected, furthest
        self._results.append(result)
        if self._first is None:
            self._first = expected
            for size in self._probed:
                self._probes[size] = self._compared(self._probe(size), size)
        for k, other in expected.at_other_k.items():
            if k not in self._at_other_k:
                self._at_other_k[k] = self._again(k)
            self._at_other_k[k].add(other)

    def add_sized(self, expected: Reference, tokens: int) -> bool:
        """Runs the graph on inputs with another number of tokens; whether it is within bounds."""
        result = self._sized[tokens] = self._compared(expected, len(expected.x))
        return not self._missed(result)

    def _missed(self, probe: _PartResult) -> bool:
        """Whether inputs with another number of tokens miss the bounds where all others meet them.

        What chooses otherwise is not compared, so that little of it may, at each number by itself.
        """
        near = (
            one.near(usual, self._tolerance)
            for one, usual in zip(probe.same, _outputs(self._results), strict=True)
        )
        wrong = probe.choices - probe.agreeing
        share = FLIPS_AT_TOKENS * (1 - self._tolerance.routing)
        return (
            not all(near)
            or self._missed_routing(probe)
            or self._chooses_far(probe, FAR_AT_TOKENS)
            or wrong > max(1.0, share * probe.choices)
        )

    def _missed_routing(self, probe: _PartResult, rows: np.ndarray | None = None) -> bool:
        """Whether too many choices are wrong; `rows` tells which inputs of the first part they are.

        Of a few inputs one may choose otherwise by chance: the share is of all of them. What is
        wrong for an input in the usual batch, too, is counted there, however often it comes again.
        """
        parts = [*self._results, *self._probes.values(), *self._sized.values()]
        pooled, least = self._parity(parts), self._tolerance.routing
        differing = probe.whole[0] > 0 and (pooled.whole_differing or 0.0) > 1 - least
        agreement = pooled.routing_agreement
        if rows is not None:
            more = int(probe.wrong.sum()) - int(self._results[0].wrong[rows].sum())
            agreement = self._parity(self._results).routing_agreement
            agreement -= max(0, more) / sum(part.choices for part in parts)
        return differing or (agreement < least and probe.first is not None)

    def alone(self, expected: Reference) -> Parity:
        """Returns how far the graph is off on these inputs without all others of their size."""
        other = self._again(self._k, self._probed)
        other._sized = self._sized
        other.add(expected)
        return other.parity()

    def _again(self, k: int | None, probed: Sequence[int] = ()) -> Comparison:
        """The same comparison with some k, to which nothing was added."""
        return Comparison(
            self._session,
            self._values,
            batch=self._batch,
            tolerance=self._tolerance,
            k=k,
            probed=probed,
            together=self._together,
        )

    @property
    def worst(self) -> Reference | None:
        """The inputs with the largest difference, as many as one batch where that matters."""
        if self._first is None:
            return None
        parity = self.parity()
        if parity.k in self._at_other_k:
            return self._at_other_k[parity.k].worst
        return self._worst if parity.batch is None else self._probe(parity.batch)

    def _probe(self, size: int) -> Reference:
        """The first inputs, and `again` where there are fewer than `size`."""
        assert self._first is not None, "something was added"
        return self._first.rows(self._probed_rows(size))

    def _probed_rows(self, size: int) -> np.ndarray:
        assert self._first is not None, "something was added"
        return again(len(self._first.x), size, self._together)

    def _compared(self, expected: Reference, batch: int) -> _PartResult:
        values, sets = self._outputs(expected, batch)
        wanted = {self._session.output_names[0]: expected.y, **expected.outputs}
        for name, array in wanted.items():
            if values[name].shape != array.shape:
                raise ParityError(
                    f"the graph gives outputs {values[name].shape}, the reference holds "
                    f"{array.shape}"
                )
        first, *further = values.values()
        return _compared(expected, first, further, sets, self._tolerance)

    def rounded(self, expected: Reference) -> Rounded:
        """Returns what the graph gives and chooses: the reference of others in its numbers."""
        values, sets = self._outputs(expected, self._batch)
        sets = {
            name: chosen if holds_coefficients(chosen) else np.sort(chosen, axis=-1)
            for name, chosen in sets.items()
        }
        return Rounded(next(iter(values.values())), sets)

    def with_rounded(self, expected: Reference) -> Reference:
        """Returns a reference with what the graph gives, with every k that it is of."""
        others = {
            k: replace(other, rounded=self._again(k).rounded(other))
            for k, other in expected.at_other_k.items()
        }
        return replace(expected, rounded=self.rounded(expected), at_other_k=others)

    def _outputs(
        self, expected: Reference, batch: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The graph's outputs by name, and what its layers chose."""
        # With k as an input a layer may choose at run time what it keeps whole at the k compared.
        compared = {n: v for n, v in self._values.items() if n in expected.selected}
        names = [*self._session.output_names[:1], *expected.outputs]
        outputs: dict[str, list[np.ndarray]] = {name: [] for name in names}
        chosen: dict[str, list[np.ndarray]] = {name: [] for name in compared}
        for part in chunks(expected.feeds(FIRST), batch):
            x = part.pop(FIRST)
            values = self._session.run(
                {self._session.input_name: x, **part} if part else x, self._k
            )
            for name in names:
                outputs[name].append(values[name])
            for name, value in compared.items():
                array = values[value]
                shape = expected.selected[name].shape
                wanted = (len(x), *shape[1:])
                of_tokens = len(shape) > array.ndim  # which the layer sees one after the other
                if len(shape) == len("smn1") and array.shape[-1:] == shape[-2:-1]:
                    array = by_expert(array)
                # One token, for which the layer in PyTorch has no axis.
                if array.shape == (len(x), 1, *shape[1:]):
                    array = array[:, 0]
                same_k = array.ndim > 0 and array.shape[-1] == shape[-1]
                if not same_k or not (of_tokens or array.shape == wanted):
                    raise ParityError(
                        f"layer {name}: the graph chose {array.shape}, the reference {wanted}"
                    )
                if of_tokens:
                    if array.size != math.prod(wanted):  # the values alone decide
                        chosen.pop(name, None)
                        continue
                    array = array.reshape(wanted)
                if name in chosen:
                    chosen[name].append(array)
        return (
            {name: np.concatenate(parts) for name, parts in outputs.items()},
            {name: np.concatenate(parts) for name, parts in chosen.items()},
        )

    def parity(self) -> Parity:
        """Returns how far the graph is off, over all that was added.

        It is that of one batch size where that alone misses the bounds, and of the k with which the
        graph is furthest off, or misses them.
        """
        mine = self._at_one_k()
        if not self._at_other_k:
            return mine
        assert self._k is not None, "references of several k are of a graph that takes it"
        parities = {self._k: mine, **{k: one.parity() for k, one in self._at_other_k.items()}}
        return furthest_off(parities)

    def _at_one_k(self) -> Parity:
        """How far the graph is off with the k of this comparison."""
        # Engines and PyTorch do not say it.
        said = getattr(self._session, "computed_in", None)
        whole = replace(self._parity(self._results), computed_in=said)
        whole = replace(
            whole,
            batches=tuple(sorted({self._batch, *self._probes})),
            token_counts=tuple(sorted(self._sized)),
        )
        if not whole.passed:
            return whole
        for size, probe in self._probes.items():
            if self._missed_in_batch(size, probe):
                return self._at_size(whole, probe, batch=size)
        for size, probe in self._sized.items():
            if self._missed(probe):
                return self._at_size(whole, probe, tokens=size)
        return whole

    def _missed_in_batch(self, size: int, probe: _PartResult) -> bool:
        """Whether inputs in another batch are further off than is allowed, or choose otherwise."""
        rows = self._probed_rows(size)
        near = (
            one.like(other, rows, self._tolerance)
            for one, other in zip(probe.same, _outputs(self._results), strict=True)
        )
        return not all(near) or self._missed_routing(probe, rows) or self._chooses_far(probe, FAR)

    def _chooses_far(self, probe: _PartResult, ties: float) -> bool:
        """Whether inputs of another size choose what no rounding makes them choose.

        Of few inputs one that chooses otherwise may be chance, but not where its scores are far
        apart, by more than so many ties, and where no input chooses so at the usual size.
        """
        usual = max(part.margin for part in self._results)
        return probe.margin > max(usual, ties * self._tolerance.tie)

    def _at_size(
        self, whole: Parity, probe: _PartResult, batch: int | None = None, tokens: int | None = None
    ) -> Parity:
        """The parity of a size that misses the bounds, with what is known of all."""
        return replace(
            self._parity([probe]),
            passed=False,
            batch=batch,
            tokens=tokens,
            batches=whole.batches,
            token_counts=whole.token_counts,
            computed_in=whole.computed_in,
        )

    def _parity(self, parts: Sequence[_PartResult]) -> Parity:
        bounds = self._tolerance
        samples = sum(part.samples for part in parts)
        tokens = any(part.by_token for part in parts)
        choices = sum(part.choices for part in parts)
        agreeing = sum(part.agreeing for part in parts)
        tied = sum(part.tied for part in parts)
        everything = Distance.of([part.everything for part in parts])
        outputs = _outputs(parts)
        if tokens and not outputs[0].inputs:  # every input has a token that chose otherwise
            outputs = (everything,)
        same = max(outputs, key=lambda output: (not output.within(bounds), output.max_rel))
        numbers = sum(part.whole[1] for part in parts)
        wrong = sum(part.whole[0] for part in parts) / numbers if numbers else None
        apart = _Rounding.times([part.rounding for part in parts if part.rounding is not None])
        return Parity(
            max_abs=same.max_abs,
            max_rel=same.max_rel,
            cosine=same.least_cosine,
            usual_rel=same.usual_rel,
            loudness=same.loudness,
            routing_agreement=agreeing / choices,
            samples=samples,
            ties=sum(part.ties for part in parts),
            passed=bool(
                all(output.within(bounds) for output in outputs)
                and agreeing / choices >= bounds.routing
                and same.inputs
                and tied <= MOST_TIES * choices
                and (wrong is None or wrong <= 1 - bounds.routing)
                and (apart is None or apart <= bounds.roundings)
            ),
            first_difference=next((part.first for part in parts if part.first), None),
            untouched_cosine=min(part.untouched_cosine for part in parts),
            jaccard=sum(part.samples * part.jaccard for part in parts) / samples,
            flip_margin=max(part.margin for part in parts),
            **asdict(bounds),
            compared=same.inputs,
            all_max_abs=everything.max_abs,
            all_max_rel=everything.max_rel,
            all_cosine=everything.least_cosine,
            differing=sum(part.differing for part in parts),
            chosen_by="tokens" if tokens else "inputs",
            choices=choices,
            agreeing=agreeing,
            tied=tied,
            apart=apart,
            whole_differing=wrong,
        )


def compare(
    session: GraphSession,
    expected: Reference,
    selected_values: Mapping[str, str],
    *,
    batch: int,
    tolerance: Tolerance,
    k: int | None = None,
) -> Parity:
    """Runs a graph on the reference's inputs and returns how far it is off (`Comparison`).

    The session may be of any runtime, which rounds as it likes within the bounds. Outputs with
    another k are not compared.
    """
    expected = replace(expected, rounded=None, at_other_k={})
    comparison = Comparison(session, selected_values, batch=batch, tolerance=tolerance, k=k)
    comparison.add(expected)
    return comparison.parity()


def furthest_off(parities: Mapping[int, Parity]) -> Parity:
    """Returns what is known of a graph that was compared with each k: the parity of the worst."""
    k = max(parities, key=lambda k: (not parities[k].passed, parities[k].max_rel))
    return replace(parities[k], k=k, ks=tuple(sorted(parities)))


def describe(parity: Parity) -> str:
    """One line about a parity result: the outputs of which inputs, and who chose what."""
    p, inputs = parity, f"{parity.samples} inputs"
    values = differences(p.max_abs, p.max_rel, p.cosine, p.usual_rel)
    if p.differing == 0:
        text = f"{values} over all {inputs}"
    elif p.compared == 0:  # outputs of other experts differ, which says nothing
        text = "no output was compared, because no input selects the same experts"
    elif p.all_max_abs is None or p.all_max_rel is None or p.all_cosine is None:
        text = values
    else:
        whole = differences(p.all_max_abs, p.all_max_rel, p.all_cosine)
        text = f"{values} where the experts are the same; {whole} over all {inputs}"
    if p.choices is None:
        text += f"; same experts in {p.routing_agreement:.0%}"
    elif p.chosen_by == "tokens":
        text += f"; same experts in {p.agreeing:,} of the {p.choices:,} choices of tokens"
    else:
        text += f"; same experts in {p.agreeing:,} of {p.choices:,} inputs"
    if p.ties:
        text += f" ({p.ties} tied, not compared)"
    if p.mostly_ties:
        what = "choices of tokens" if p.chosen_by == "tokens" else "inputs"
        text += (
            f"; MOST WAS NOT COMPARED: {p.tied:,} of {p.choices:,} {what} are ties (scores within "
            f"{p.tie:g} of the k-th)"
        )
    text = _at_size(p) + text + _whole(p) + _apart(p)
    if p.k is not None:
        text = f"with k = {p.k}, the furthest off of {', '.join(map(str, p.ks))}: {text}"
    if p.first_difference:
        text += f"; first difference in layer {p.first_difference}"
    if p.flip_margin:
        text += f"; flips at margins up to {p.flip_margin:.1g} of the k-th score"
    return text


def _at_size(p: Parity) -> str:
    """Which size misses the bounds where others meet them."""
    if p.tokens is not None:
        return f"with {p.tokens} tokens: "
    return "" if p.batch is None else f"in a batch of {p.batch}: "


def _whole(p: Parity) -> str:
    """What is said of outputs of whole numbers."""
    if not p.whole_differing:
        return ""
    return f"; {p.whole_differing:.2%} of the whole numbers that it gives differ"


def _apart(p: Parity) -> str:
    """What is said of a graph that rounds otherwise than another lowering."""
    if p.apart is None or p.apart <= p.roundings:
        return ""
    if p.routing == 1.0:  # FP32
        return (
            f"; {p.apart:.2g} TIMES as far from float64 as PyTorch's float32 is, where "
            f"{p.roundings:g} times is the most"
        )
    return (
        f"; {p.apart:.2g} TIMES as far from what another lowering gives in the same numbers as "
        f"that is from PyTorch, where {p.roundings:g} times is the most"
    )


def differences(
    max_abs: float, max_rel: float, cosine: float, usual_rel: float | None = None
) -> str:
    """Returns how far outputs are off, in words."""
    shown = f"{max_rel:.2g} of max|y|"
    if usual_rel is not None and usual_rel < max_rel / 2:
        shown += f", {usual_rel:.2g} in {1 - OUTLIERS:.0%} of the inputs"
    return f"max |difference| {max_abs:.2g} ({shown}), cosine {cosine:.7f}"


def _outputs(parts: Sequence[_PartResult]) -> tuple[Distance, ...]:
    """How far each output is off, over the inputs of all parts."""
    by_output = zip(*(part.same for part in parts), strict=True)
    return tuple(Distance.of(list(distances)) for distances in by_output)


CHOICES_BY_CHANCE = 0.005
"""Of all choices so many, and one at least, may differ between two graphs that round alike."""


@dataclass(frozen=True, slots=True)
class _Rounding:
    """How far a graph is from what the same rounding gives, and how far that is from PyTorch.

    Each as the largest difference of an output, the sum of squares, and how many choices differ;
    `scale` holds those of the outputs themselves, and how many choices there are.
    """

    off: tuple[float, float, float]
    own: tuple[float, float, float]
    scale: tuple[float, float, float]
    exact: bool
    half: bool

    @staticmethod
    def times(parts: Sequence[_Rounding]) -> float | None:
        """Returns the quotient over all parts, the largest of the three; None without any.

        What FP32 may differ by is taken off, and what is chance of choices. Beside float64 it is
        the last bit, and choices are not counted: FP32 graphs make those of PyTorch anyway.
        Where weights alone are rounded (`half`) a largest difference of FP16's last bit counts for
        nothing: sums in another order are rounded to either neighbour.
        """
        if not parts:
            return None
        exact, half = all(part.exact for part in parts), all(part.half for part in parts)
        factor = 0.0
        single = float(np.finfo(np.float32).eps) if exact else TOLERANCES["fp32"].rtol
        combined: tuple[Callable[[list[float]], float], ...] = (max, _length, math.fsum)
        combined = combined[:2] if exact else combined
        for index, combine in enumerate(combined):
            off, own, scale = (
                combine([row[index] for row in column])
                for column in zip(*((p.off, p.own, p.scale) for p in parts), strict=True)
            )
            chosen = combine is math.fsum
            slack = max(1.0, CHOICES_BY_CHANCE * scale) if chosen else single * scale
            if not np.isfinite(off):
                return float("inf")
            if half and combine is max and off <= float(np.finfo(np.float16).eps) * scale:
                continue
            factor = max(factor, max(0.0, off - slack) / max(own, slack, 1e-30))
        return factor

    @staticmethod
    def of(
        expected: Reference, y: np.ndarray, sets: Mapping[str, np.ndarray], tolerance: Tolerance
    ) -> _Rounding | None:
        """Compares all choices, and the outputs of inputs in which all are alike.

        None without a record.
        """
        rounded = expected.rounded
        if rounded is None:
            return None

        def differing(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> np.ndarray:
            """How many choices of each input."""
            count = np.zeros(len(y))
            for name in one.keys() & other.keys():
                count += _different(one[name], other[name], tolerance).sum(axis=1)
            return count

        others, own = (
            differing(sets, rounded.selected),
            differing(rounded.selected, expected.selected),
        )
        alike, exact = others == 0, own == 0
        if not exact.any():  # each input has a token that rounding sends elsewhere
            exact = ~exact
        common = sets.keys() & rounded.selected.keys()
        made = sum(int(places(rounded.selected[name], sets[name]).sum()) for name in common)
        return _Rounding(
            off=(*_size(y[alike], rounded.y[alike]), float(others.sum())),
            own=(*_size(rounded.y[exact], expected.y[exact]), float(own.sum())),
            scale=(*_size(rounded.y), float(made)),
            exact=rounded.exact,
            half=tolerance.roundings < 1.0 and rounded.half,
        )


def _size(y: np.ndarray, less: np.ndarray | float = 0.0) -> tuple[float, float]:
    """The largest absolute number of a difference, and its sum of squares per input."""
    off = y.astype(np.float64) - less
    return float(np.abs(off).max(initial=0.0)), float((off**2).sum()) / max(1, len(y))


def _length(squares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(squares))


@dataclass(frozen=True, slots=True)
class _PartResult:
    """What one part of the inputs gave.

    `ties` samples differ by a tie alone, `differing` anywhere. Of `choices`, made by each input or
    `by_token`, so many are `agreeing`, of which `tied` differ by a tie, and so many of each input
    are `wrong`; `first` is the first layer that truly differs, `jaccard` the mean overlap of the
    sets, `margin` the largest of a choice that differs. `same` is of each output where the experts
    are the same, and `everything` of the first, whatever was chosen.
    """

    samples: int
    ties: int
    differing: int
    choices: int
    agreeing: int
    wrong: np.ndarray
    tied: int
    by_token: bool
    first: str | None
    jaccard: float
    margin: float
    same: tuple[Distance, ...]
    everything: Distance
    untouched_cosine: float
    rounding: _Rounding | None
    whole: tuple[int, int]
    """Of the outputs of whole numbers, how many numbers differ, and how many there are."""


def _compared(
    expected: Reference,
    y: np.ndarray,
    further: Sequence[np.ndarray],
    sets: Mapping[str, np.ndarray],
    tolerance: Tolerance,
) -> _PartResult:
    """Compares outputs, and what was chosen, with the reference.

    After the first difference of a sample its later layers see other inputs, so only the first
    counts as a tie or a miss; all count for the overlap. Of tokens that choose for themselves,
    and may differ here and there, each counts by itself.
    """
    # By layer, each [s, places that choose]; what differs by more than a tie is wrong.
    differs = {name: _different(sets[name], expected.selected[name], tolerance) for name in sets}
    margins = {name: expected.margin[name].reshape(differs[name].shape) for name in sets}
    wrong = {name: differs[name] & (margins[name] > tolerance.tie) for name in sets}
    ties, misses, apart = (np.zeros(len(expected.x), dtype=bool) for _ in range(3))
    first: str | None = None
    margin = 0.0
    for name in sets:
        fresh = differs[name] & ~(ties | misses)[:, None]
        margin = max(margin, float(margins[name][fresh].max(initial=0.0)))
        missed = (fresh & wrong[name]).any(axis=1)
        if first is None and missed.any():
            first = name
        ties |= fresh.any(axis=1) & ~missed
        misses |= missed
        apart |= differs[name].any(axis=1)
    choices, of_input = misses.size, misses.astype(int)
    same, tied = ~(ties | misses), int(ties.sum())
    by_token = tolerance.routing < 1.0 and any(chosen.ndim > 2 for chosen in sets.values())
    if by_token:
        counted = {name: places(expected.selected[name], sets[name]) for name in sets}
        choices = sum(int(mask.sum()) for mask in counted.values())
        of_input = sum((counted[name] & wrong[name]).sum(axis=1) for name in sets)
        same = _same_tokens([*differs.values()], expected.y.shape)
        tied = sum(int((differs[name] & ~wrong[name]).sum()) for name in differs)
    outputs = [(expected.y, y), *zip(expected.outputs.values(), further, strict=True)]
    # Of classes and masks none is nearly right: they are counted.
    samples = np.logical_and.reduce(same.reshape(len(y), -1), axis=1)
    whole = [(a[samples], b[samples]) for a, b in outputs if a.dtype.kind != "f"]
    overlaps = [_jaccard(sets[name], expected.selected[name]) for name in sets]
    return _PartResult(
        samples=len(y),
        ties=int(ties.sum()),
        differing=int(apart.sum()),
        choices=choices,
        agreeing=choices - int(of_input.sum()),
        wrong=of_input,
        tied=tied,
        by_token=by_token,
        first=first,
        jaccard=float(np.mean(overlaps)) if overlaps else 1.0,
        margin=margin,
        same=(
            distance(expected.y, y, same),
            # Where tokens differ by themselves others have their places elsewhere.
            *(distance(wanted, actual, samples) for wanted, actual in outputs[1:]),
        ),
        everything=distance(expected.y, y, np.ones(len(y), dtype=bool)),
        untouched_cosine=float(cosines(y, expected.dense).min(initial=1.0)),
        rounding=_Rounding.of(expected, y, sets, tolerance),
        whole=(sum(int((a != b).sum()) for a, b in whole), sum(a.size for a, b in whole)),
    )


def _same_tokens(differs: Sequence[np.ndarray], output: tuple[int, ...]) -> np.ndarray:
    """What is to be compared where tokens choose for themselves and some may differ.

    Those are the tokens [s, m] that chose alike in every layer, where outputs of this shape have
    these tokens; else the samples [s] all of whose tokens did.
    """
    tokens = all(mask.shape == output[:2] and len(output) > mask.ndim for mask in differs)
    each_alike = [~mask if tokens else ~mask.any(axis=1) for mask in differs]
    same: np.ndarray = np.logical_and.reduce(each_alike)
    return same


def _jaccard(actual: np.ndarray, expected: np.ndarray) -> float:
    """The mean overlap of two choices: of sets of experts [s, k], or of non-zero coefficients."""
    if holds_coefficients(expected):
        one, other = actual > 0, expected > 0
        shares = (one & other).sum(axis=-1) / np.maximum(1, (one | other).sum(axis=-1))
        return float(shares.mean())
    k = expected.shape[-1]
    return float(jaccard(actual.reshape(-1, k), expected.reshape(-1, k)).mean())


def jaccard(chosen: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Returns |A∩B| / |A∪B| of the sets in each row: [b, k], [b, k] to [b]; order is ignored."""
    common = (chosen[:, :, None] == reference[:, None, :]).any(axis=2).sum(axis=1)
    shares: np.ndarray = common / (chosen.shape[1] + reference.shape[1] - common)
    return shares


def _different(actual: np.ndarray, expected: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    """Where two choices differ: [s, 1] for sets of experts [s, k], [s, m] for those of tokens.

    Below FP32 the rounding before a layer moves its coefficients, so that experts count which only
    one of both has kept.
    """
    if holds_coefficients(expected):
        off = np.abs(actual - expected)
        if tolerance.routing < 1.0:
            off = np.where((actual > 0) == (expected > 0), 0.0, off)
        different: np.ndarray = (off > tolerance.coefficient).any(axis=-1)
        return different
    other: np.ndarray = (np.sort(actual, axis=-1) != expected).any(axis=-1)
    return other.reshape(len(other), -1)
