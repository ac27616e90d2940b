"""Compares a graph with what PyTorch computed: names, shapes, values, and what its layers chose.

A `Comparison` runs the graph, at several sizes, and compares in that order: `_run` takes outputs
and choices by their names, `_compared` their shapes, `Distance` the values, `_part_result` the
choices; `_Rounding` is a second bound, of what the graph's numbers allow. `_parity` is the verdict.
None of it needs PyTorch, whose part is a record (`bundle.parity_record.Reference`): so `verify`
does what an export did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ParityError
from .bundle.parity_record import (
    FIRST,
    OUTLIERS,
    TOLERANCES,
    Parity,
    Reference,
    Rounded,
    Tolerance,
    by_expert,
    chunks,
    holds_coefficients,
    places,
)
from .inputs import again

if TYPE_CHECKING:
    from .session import GraphSession

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


@dataclass(slots=True, eq=False)
class Comparison:
    """A graph that is compared with its reference, some inputs at a time.

    `selected_values` names the graph's value that holds a layer's chosen experts, for the layers
    that choose. `batch` should differ from the size that was traced. The first of the inputs are
    compared in batches of each size of `probed`, too: a size that was frozen in the trace, or
    anything else that depends on the batch, is right in one of them at most. Inputs of which so
    many are computed `together` stay so there.
    """

    session: GraphSession
    selected_values: Mapping[str, str]
    _: KW_ONLY
    batch: int
    tolerance: Tolerance
    k: int | None = None
    probed: Sequence[int] = ()
    together: int = 1
    _results: list[_PartResult] = field(default_factory=list, init=False)
    _in_batches: dict[int, _PartResult] = field(default_factory=dict, init=False)
    """Of the first inputs, by each size of `probed`."""
    _at_tokens: dict[int, _PartResult] = field(default_factory=dict, init=False)
    """By each other number of tokens."""
    _at_other_k: dict[int, Comparison] = field(default_factory=dict, init=False)
    _first: Reference = field(init=False, repr=False)
    _worst: Reference = field(init=False, repr=False)
    _furthest: float = field(default=0.0, init=False)

    def add(self, expected: Reference) -> None:
        """Runs the graph on the reference's inputs, with each k that it holds outputs of."""
        result = self._compared(expected, self.batch)
        furthest, is_first = result.everything.max_rel, not self._results
        if is_first or furthest > self._furthest:
            self._worst, self._furthest = expected, furthest
        self._results.append(result)
        if is_first:
            self._first = expected
            for size in self.probed:
                if size != self.batch:
                    self._in_batches[size] = self._compared(self._probe(size), size)
        for k, other in expected.at_other_k.items():
            if k not in self._at_other_k:
                self._at_other_k[k] = replace(self, k=k, probed=())
            self._at_other_k[k].add(other)

    def add_sized(self, expected: Reference, tokens: int) -> bool:
        """Runs the graph on inputs with another number of tokens; whether it is within bounds."""
        result = self._at_tokens[tokens] = self._compared(expected, len(expected.x))
        return not self._missed_at_tokens(result)

    def with_rounded(self, expected: Reference) -> Reference:
        """Returns a reference with what the graph gives and chooses, for each k that it is of.

        That is the reference of other graphs in the same numbers.
        """
        values, sets = self._run(expected, self.batch)
        sets = {
            name: chosen if holds_coefficients(chosen) else np.sort(chosen, axis=-1)
            for name, chosen in sets.items()
        }
        others = {
            k: replace(self, k=k, probed=()).with_rounded(other)
            for k, other in expected.at_other_k.items()
        }
        rounded = Rounded(next(iter(values.values())), sets)
        return replace(expected, rounded=rounded, at_other_k=others)

    def alone(self, expected: Reference) -> Parity:
        """Returns how far the graph is off on these inputs without all others of their size."""
        other = replace(self)
        other._at_tokens = self._at_tokens
        other.add(expected)
        return other.parity()

    @property
    def worst(self) -> Reference:
        """The inputs with the largest difference, as many as one batch where that matters."""
        parity = self.parity()
        if parity.k in self._at_other_k:
            return self._at_other_k[parity.k].worst
        return self._worst if parity.batch is None else self._probe(parity.batch)

    def parity(self) -> Parity:
        """Returns how far the graph is off, over all that was added.

        It is that of one batch size where that alone misses the bounds, and of the k with which the
        graph is furthest off, or misses them.
        """
        mine = self._at_one_k()
        if not self._at_other_k:
            return mine
        assert self.k is not None, "references of several k are of a graph that takes it"
        parities = {self.k: mine, **{k: one.parity() for k, one in self._at_other_k.items()}}
        return furthest_off(parities)

    def _compared(self, expected: Reference, batch: int) -> _PartResult:
        """Compares names and shapes, then values and what was chosen (`_part_result`)."""
        values, sets = self._run(expected, batch)
        wanted = {self.session.output_names[0]: expected.y, **expected.outputs}
        outputs = [(array, values[name]) for name, array in wanted.items()]
        for array, actual in outputs:
            if actual.shape != array.shape:
                raise ParityError(
                    f"the graph gives outputs {actual.shape}, the reference holds {array.shape}"
                )
        return _part_result(expected, outputs, sets, self.tolerance)

    def _run(
        self, expected: Reference, batch: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The graph's outputs by name, and what its layers chose."""
        # With k as an input a layer may choose at run time what it keeps whole at the k compared.
        compared = {n: v for n, v in self.selected_values.items() if n in expected.selected}
        names = dict.fromkeys((self.session.output_names[0], *expected.outputs))
        outputs: dict[str, list[np.ndarray]] = {name: [] for name in names}
        chosen: dict[str, list[np.ndarray]] = {name: [] for name in compared}
        for part in chunks(expected.feeds(FIRST), batch):
            x = part.pop(FIRST)
            values = self.session.run({self.session.input_name: x, **part} if part else x, self.k)
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

    def _probe(self, size: int) -> Reference:
        """The first inputs, and `again` where there are fewer than `size`."""
        return self._first.rows(self._probed_rows(size))

    def _probed_rows(self, size: int) -> np.ndarray:
        return again(len(self._first.x), size, self.together)

    def _at_one_k(self) -> Parity:
        """How far the graph is off with the k of this comparison.

        A size that misses the bounds where the usual one meets them decides.
        """
        known: dict[str, Any] = {
            "computed_in": getattr(self.session, "computed_in", None),  # PyTorch does not say it
            "batches": tuple(sorted({self.batch, *self._in_batches})),
            "token_counts": tuple(sorted(self._at_tokens)),
        }
        whole = replace(_parity(self._results, self.tolerance), **known)
        if not whole.passed:
            return whole
        known["passed"] = False
        for size, probe in self._in_batches.items():
            if self._missed_in_batch(size, probe):
                return replace(_parity([probe], self.tolerance), batch=size, **known)
        for size, probe in self._at_tokens.items():
            if self._missed_at_tokens(probe):
                return replace(_parity([probe], self.tolerance), tokens=size, **known)
        return whole

    def _missed_in_batch(self, size: int, probe: _PartResult) -> bool:
        """Whether inputs in another batch are further off than is allowed, or choose otherwise."""
        rows = self._probed_rows(size)
        near = (
            one.like(other, rows, self.tolerance)
            for one, other in zip(probe.same, _by_output(self._results), strict=True)
        )
        return not all(near) or self._missed_routing(probe, rows) or self._chooses_far(probe, FAR)

    def _missed_at_tokens(self, probe: _PartResult) -> bool:
        """Whether inputs with another number of tokens miss the bounds where all others meet them.

        What chooses otherwise is not compared, so that little of it may, at each number by itself.
        """
        near = (
            one.near(usual, self.tolerance)
            for one, usual in zip(probe.same, _by_output(self._results), strict=True)
        )
        share = FLIPS_AT_TOKENS * (1 - self.tolerance.routing)
        return (
            not all(near)
            or self._missed_routing(probe)
            or self._chooses_far(probe, FAR_AT_TOKENS)
            or int(probe.wrong.sum()) > max(1.0, share * probe.choices)
        )

    def _missed_routing(self, probe: _PartResult, rows: np.ndarray | None = None) -> bool:
        """Whether too many choices are wrong; `rows` tells which inputs of the first part they are.

        Of a few inputs one may choose otherwise by chance: the share is of all of them. What is
        wrong for an input in the usual batch, too, is counted there, however often it comes again.
        """
        parts = [*self._results, *self._in_batches.values(), *self._at_tokens.values()]
        pooled, least = _parity(parts, self.tolerance), self.tolerance.routing
        differing = probe.whole[0] > 0 and (pooled.whole_differing or 0.0) > 1 - least
        agreement = pooled.routing_agreement
        if rows is not None:
            more = int(probe.wrong.sum()) - int(self._results[0].wrong[rows].sum())
            agreement = _parity(self._results, self.tolerance).routing_agreement
            agreement -= max(0, more) / sum(part.choices for part in parts)
        return differing or (agreement < least and probe.first is not None)

    def _chooses_far(self, probe: _PartResult, ties: float) -> bool:
        """Whether inputs of another size choose what no rounding makes them choose.

        Of few inputs one that chooses otherwise may be chance, but not where its scores are far
        apart, by more than so many ties, and where no input chooses so at the usual size.
        """
        usual = max(part.margin for part in self._results)
        return probe.margin > max(usual, ties * self.tolerance.tie)


def _parity(parts: Sequence[_PartResult], bounds: Tolerance) -> Parity:
    """The verdict over all parts."""
    samples = sum(part.samples for part in parts)
    tokens = any(part.by_token for part in parts)
    choices = sum(part.choices for part in parts)
    agreeing = choices - sum(int(part.wrong.sum()) for part in parts)
    tied = sum(part.tied for part in parts)
    everything = Distance.of([part.everything for part in parts])
    outputs = _by_output(parts)
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
        bounds=bounds,
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


def _by_output(parts: Sequence[_PartResult]) -> tuple[Distance, ...]:
    """How far each output is off, over the inputs of all parts."""
    by_output = zip(*(part.same for part in parts), strict=True)
    return tuple(Distance.of(list(distances)) for distances in by_output)


@dataclass(frozen=True, slots=True)
class _PartResult:
    """What one part of the inputs gave.

    `ties` samples differ by a tie alone, `differing` anywhere. Of `choices`, made by each input or
    `by_token`, so many of each input are `wrong`, and `tied` differ by a tie; `first` is the first
    layer that truly differs, `jaccard` the mean overlap of the sets, `margin` the largest of a
    choice that differs. `same` is of each output where the experts are the same, and `everything`
    of the first, whatever was chosen.
    """

    samples: int
    ties: int
    differing: int
    choices: int
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


def _part_result(
    expected: Reference,
    outputs: Sequence[tuple[np.ndarray, np.ndarray]],
    sets: Mapping[str, np.ndarray],
    tolerance: Tolerance,
) -> _PartResult:
    """Compares values, each output beside what is expected of it, and what was chosen.

    After the first difference of a sample its later layers see other inputs, so only the first
    counts as a tie or a miss; all count for the overlap. Of tokens that choose for themselves,
    and may differ here and there, each counts by itself.
    """
    y = outputs[0][1]
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
    # Of classes and masks none is nearly right: they are counted.
    samples = np.logical_and.reduce(same.reshape(len(y), -1), axis=1)
    whole = [(a[samples], b[samples]) for a, b in outputs if a.dtype.kind != "f"]
    overlaps = [_jaccard(sets[name], expected.selected[name]) for name in sets]
    return _PartResult(
        samples=len(y),
        ties=int(ties.sum()),
        differing=int(apart.sum()),
        choices=choices,
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


FEW_NUMBERS = 8
"""Of fewer numbers the largest may be near zero by chance, and their direction says little."""

SILENT = 1e-3
"""Of what quiet inputs give: less than that is no scale, since rounding leaves as much."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one output is off, by input [s]: the largest difference, and the cosine.

    `own` is the largest number that was expected of an input, and `numbers` how many there are.
    Inputs are `counted` of which anything was compared.
    """

    off: np.ndarray
    own: np.ndarray
    cosine: np.ndarray
    counted: np.ndarray
    numbers: int

    def scale(self) -> np.ndarray:
        """Returns what the difference of each input is relative to: its own largest number.

        An output of few numbers has the scale of most inputs at least, and one of zeros that of the
        quiet inputs: the largest number of all would hide whatever happens to the others.
        """
        some = self.own[self.counted & (self.own > 0)]
        if not some.size:
            return np.ones_like(self.own)
        quiet = float(np.quantile(some, 0.1))
        least = float(np.median(some)) if self.numbers < FEW_NUMBERS else SILENT * quiet
        return np.maximum(np.where(self.own > 0, self.own, quiet), least)

    @property
    def inputs(self) -> int:
        return int(self.counted.sum())

    @property
    def max_abs(self) -> float:
        return float(self.off.max(initial=0.0))

    @property
    def max_rel(self) -> float:
        """The largest difference in the scale of its input."""
        return float(self._beyond().max(initial=0.0))

    @property
    def usual_rel(self) -> float:
        """What all inputs but the outliers are within, in their scales."""
        return _usual(self._beyond())

    @property
    def loudness(self) -> tuple[float, float]:
        """The largest number of the quietest input and of the loudest."""
        own = self.own[self.counted]
        return float(own.min(initial=np.inf)) if own.size else 0.0, float(own.max(initial=0.0))

    @property
    def least_cosine(self) -> float:
        return float(self.cosine[self.counted].min(initial=1.0))

    def within(self, bounds: Tolerance) -> bool:
        """Whether the inputs are within the bounds, each in its own scale."""
        usual = _usual(self._beyond(bounds.atol)) <= bounds.rtol
        return usual and self.within_outliers(bounds)

    def within_outliers(self, bounds: Tolerance) -> bool:
        """Whether each of a few inputs is as near as an outlier may be."""
        largest = float(self._beyond(bounds.atol).max(initial=0.0))
        return largest <= bounds.outlier * bounds.rtol and not self.turned(bounds.least_cosine)

    def near(self, usual: Distance, bounds: Tolerance) -> bool:
        """Whether a few inputs with another number of tokens are no far outliers.

        They may be further off where the furthest at the usual number are so, too.
        """
        largest = float(self._beyond(bounds.atol).max(initial=0.0))
        most = max(OUTLIER_AT_TOKENS * bounds.rtol, FURTHER_AT_TOKENS * usual.max_rel)
        return largest <= most and self.within_outliers(bounds)

    def _beyond(self, atol: float = 0.0) -> np.ndarray:
        """By how much more than `atol` each input that is counted is off, in its scale."""
        excess: np.ndarray = (np.maximum(0.0, self.off - atol) / self.scale())[self.counted]
        return excess

    def turned(self, least: float) -> bool:
        """Whether the outputs of an input point elsewhere, as far as they have a direction."""
        if self.numbers < FEW_NUMBERS:
            return False
        heard = self.counted & (self.own >= self.scale())
        return bool((self.cosine[heard] < least).any())

    def like(self, other: Distance, rows: np.ndarray, bounds: Tolerance) -> bool:
        """Whether inputs in another batch are as near as the bounds allow, or as they are anyway.

        They are those `rows` of an other, which tells their scales: a few of them say little.
        """
        allowed, off = bounds.atol + bounds.rtol * other.scale()[rows], other.off[rows]
        return bool((self.off <= np.where(off > allowed, OUTLIER_IN_A_BATCH * off, allowed)).all())

    @staticmethod
    def of(parts: Sequence[Distance]) -> Distance:
        """Returns the distance over the inputs of all parts."""
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("off", "own", "cosine", "counted")
        }
        return Distance(**joined, numbers=min(part.numbers for part in parts))


OUTLIER_AT_TOKENS = 1.5
"""How far a few inputs may be off at another number of tokens, over what most may be off."""

FURTHER_AT_TOKENS = 2.0
"""The same, over what the furthest are off at the usual number."""

OUTLIER_IN_A_BATCH = 1.5
"""How far an outlier may be off in a batch of another size, over what it is off anyway."""


def _usual(relative: np.ndarray) -> float:
    """What all are within but the outliers."""
    if not relative.size:
        return 0.0
    return float(np.sort(relative)[len(relative) - 1 - int(OUTLIERS * len(relative))])


def distance(expected: np.ndarray, y: np.ndarray, same: np.ndarray) -> Distance:
    """How far outputs are off in the samples [s] or tokens [s, m] that are `same`.

    Whole numbers are no distances: whoever compares counts those that differ.
    """
    if expected.dtype.kind != "f":
        expected = y = np.zeros(expected.shape)
    spread = same.reshape(*same.shape, *(1,) * (y.ndim - same.ndim))
    actual = np.where(spread, y, 0.0).astype(np.float64).reshape(len(y), -1)
    wanted = np.where(spread, expected, 0.0).astype(np.float64).reshape(len(y), -1)
    off = np.abs(actual - wanted).max(axis=1, initial=0.0)
    return Distance(
        off=np.where(np.isfinite(off), off, np.inf),
        own=np.abs(wanted).max(axis=1, initial=0.0),
        cosine=cosines(actual, wanted),
        counted=np.asarray(same.reshape(len(y), -1).any(axis=1)),
        numbers=actual.shape[1],
    )


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the cosine of each sample's outputs, [s, …], [s, …] → [s], in float64.

    1 where both are zero, 0 where one is, or where a number is not finite.
    """
    a, b = (part.reshape(len(part), -1).astype(np.float64) for part in (a, b))
    zero = ~a.any(axis=1) & ~b.any(axis=1)
    with np.errstate(invalid="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = np.where(zero, 1.0, (a * b).sum(axis=1) / np.where(norms == 0, 1.0, norms))
    return np.where(np.isfinite(cosine), cosine, 0.0)


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
