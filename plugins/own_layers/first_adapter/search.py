"""A first adapter for a layer: reads its experts, and guesses the computation around them.

Each guess is a text that runs like a user's adapter and is compared with the layer's result. One
that matches is the adapter; without one, the message names the part that was not recognised, and
the layer's own forward is the start of an adapter.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from math import inf
from time import process_time
from typing import Any

import torch
from torch import nn

from ....common.console import Progress, Silent
from ....common.threads import with_threads
from ....data.user_code import callable_named, module_made
from ....errors import FamilyError, ParityError, UsageError
from ....graphs.sizes import Sizes, parse_range
from ..calls import changed_buffers
from ..examples import INPUT_SHAPE
from ..expert_forms import PAIRS
from ..mismatch import CLOSE, TOLERANCE, difference
from .forms import (
    ClampBounds,
    FormCount,
    Guess,
    OutOfTimeError,
    RoutedForm,
    RoutedForms,
    call_text,
)
from .kept import keep_adapter, kept_adapter, key_of
from .readings import ExpertsReading, TriedSizes, call_of, called, optional_inputs, readings_of
from .seen import WatchedForward
from .soft_forms import SoftForms
from .start import joined, start_of
from .tries import Tries

STACKED = "w1=, b1=, w2= and b2=, stacked: w1 is [n, in, hidden], w2 [n, hidden, out]"

SECONDS = 60.0
"""The default limit of CPU time for a search."""

MOST_NEARLY = 4
"""Texts that match usual inputs alone, and are tried with limits that the layer has."""


@dataclass(frozen=True, slots=True)
class FirstAdapter:
    """An adapter as Python code.

    `missing` is the part that was not recognised, empty if it matches. `notes` list the parts of
    the layer's forward that no input reached, which the adapter may lack.
    """

    code: str
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()


def first_adapter(
    source: str,
    config: Mapping[str, Any],
    sizes: TriedSizes | None = None,
    progress: Progress | None = None,
    seconds: float = SECONDS,
) -> FirstAdapter:
    """Returns an adapter for the layer that `package.module:Class` makes with `config`.

    The search takes about `seconds` of CPU time at most. Raises UsageError if the layer cannot be
    made or does not accept the requested sizes.
    """
    sizes, progress = sizes or TriedSizes(), progress or Silent()
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    torch.manual_seed(0)
    layer = module_made(source, "a layer", arguments, arguments_of(source))
    layer = layer.float().eval().requires_grad_(False)
    for parameter in layer.parameters():  # zeros and ones hide what multiplies and adds
        if parameter.ndim < 2 or float(parameter.std()) == 0:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    key = key_of(layer, source, config, sizes)
    ended = f"{key[:24]}-{seconds:g}s"  # another limit may find another adapter
    known = kept_adapter(key) or kept_adapter(ended)
    if known is not None:
        progress.step(f"using the result of an earlier search of {source}")
        return FirstAdapter(**known)
    # The layers are small: more threads than one take longer, on a busy machine far longer.
    with with_threads(1):
        search = _Search(layer, config.get(INPUT_SHAPE), sizes, source, progress, seconds)
        found = search.result()
    keep_adapter(
        ended if search.ended else key, code=found.code, missing=found.missing, notes=found.notes
    )
    return found


def arguments_of(source: str) -> str:
    """Returns how the arguments of a layer's class are given, by their own names."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(callable_named(source, "a layer"))
    except (TypeError, ValueError):
        return "--set KEY=VALUE sets its arguments"
    taken = [each for each in signature.parameters.values() if each.kind in kinds]
    if not taken:
        return f"{source} takes no arguments by name"
    needed = [each.name for each in taken if each.default is Parameter.empty]
    others = ", ".join(str(each.replace(annotation=Parameter.empty)) for each in taken)
    shown = " ".join(f"--set {name}=…" for name in needed or [taken[0].name])
    return f"it takes {others}: {shown}"


def sizes_of(batch: Sizes | None, tokens: Sizes | None) -> TriedSizes:
    """Returns the sizes to try a layer with, by `--batch` and `--tokens` as they were given."""
    batches, lengths = (
        None if given is None else parse_range(given, option)
        for given, option in ((batch, "--batch"), (tokens, "--tokens"))
    )
    usual = TriedSizes()
    return TriedSizes(
        batches=usual.batches if batches is None else (batches.opt, batches.min, batches.max),
        tokens=usual.tokens if lengths is None else (lengths.opt, lengths.min, lengths.max),
        asked_batches=batches is not None,
        asked_tokens=lengths is not None,
    )


@dataclass(slots=True)
class _Tried:
    """The result for one reading of the experts.

    `whole`: all forms were tried. `nearly` are texts that match usual inputs, with the inputs that
    they do not match and how far off they are for them.
    """

    guess: Guess
    watched: WatchedForward
    right_experts: bool = False
    fits: bool = True
    whole: bool = False
    nearly: list[tuple[str, str, float]] = field(default_factory=list)


class _Search:
    """The guesses for one layer, one reading of its experts after the other."""

    def __init__(
        self,
        layer: nn.Module,
        shape: object,
        sizes: TriedSizes,
        source: str,
        progress: Progress,
        seconds: float,
    ) -> None:
        self.layer, self.shape, self.sizes = layer, shape, sizes
        self.source, self.progress, self.seconds = source, progress, seconds
        self.ends, self.ended = process_time() + seconds, False

    def result(self) -> FirstAdapter:
        """Returns the first guess that matches, or a start that names the missing part."""
        try:
            readings = readings_of(self.layer)
        except FamilyError as error:
            return self._bare_start(error)
        tried: list[_Tried] = []
        refused: UsageError | ParityError | None = None
        for reading in readings:
            if reading.problem is not None:
                continue
            try:
                one = self._guess(reading)
                tried.append(one)
                found = self._matching(one)
            except (UsageError, ParityError) as error:
                if self.sizes.asked_batches or self.sizes.asked_tokens:
                    raise  # the layer may accept other sizes
                refused = refused or error
                continue
            except OutOfTimeError:
                self.ended = True
                break
            if found is not None:
                return FirstAdapter(self._whole(found), (), tuple(self._notes(one.watched)))
        why = [] if refused is None or tried else [f"{refused.message} ({refused.hint})"]
        why += [self._out_of_time(tried)] if self.ended else []
        nearly = next((one for one in tried if one.nearly), None)
        found_so_far = self._start(tried, readings) if nearly is None else self._nearly(nearly)
        return replace(found_so_far, missing=(*why, *found_so_far.missing))

    def _out_of_time(self, tried: Sequence[_Tried]) -> str:
        """The parts of the search that were left out, and how to continue it."""
        forms = sum(one.guess.count.forms for one in tried)
        return (
            f"the search ended after {self.seconds:g} s of CPU time and {forms} forms, none "
            f"of which matches: --time {2 * self.seconds:g}s searches longer"
        )

    def _start(self, tried: Sequence[_Tried], readings: Sequence[ExpertsReading]) -> FirstAdapter:
        """The layer's own forward as a start, and why nothing better was found."""
        fit = (each for each in readings if each.problem is None)
        reading = tried[0].guess.reading if tried else next(fit, readings[0])
        start = start_of(self.layer, reading)
        lines = [*start.before, f"def forward({start.parameters}):", joined(start.lines), ""]
        call = call_text("moexport.Experts", [reading.keywords, "forward=forward"])
        missing = [*map(_result, tried)]
        missing += [f"the experts: {each.problem}" for each in readings if each.problem is not None]
        code = self._whole("\n".join([*lines, call]), start.imports)
        return FirstAdapter(code, tuple(missing[:MOST_REPORTED]))

    def _bare_start(self, error: FamilyError) -> FirstAdapter:
        """The layer's own forward if no part of it was recognised as its experts."""
        reading = ExpertsReading(
            keywords="experts=[...]",
            words="",
            count=0,
            dim=0,
            own=frozenset(),
            uses=frozenset(self._likely_experts()),
            arguments={},
        )
        start = start_of(self.layer, reading)
        lines = [*start.before, f"def forward({start.parameters}):", joined(start.lines), ""]
        lines += [f"# Name the experts: {PAIRS};", f"# or {STACKED}."]
        body = "\n".join([*lines, "return moexport.Experts(experts=[...], forward=forward)"])
        return FirstAdapter(self._whole(body, start.imports), (error.message,))

    def _likely_experts(self) -> list[str]:
        """The attributes named like experts; otherwise all with weights that are not a router."""
        names = [name.partition(".")[0] for name, _ in self.layer.named_parameters()]
        called = [name for name in names if "expert" in name.lower()]
        routers = ("gate", "rout")
        return called or [n for n in names if not any(word in n.lower() for word in routers)]

    def _guess(self, reading: ExpertsReading) -> _Tried:
        """A reading with a call that the layer accepts; raises UsageError if there is none."""
        watched = WatchedForward(self.layer)
        call = called(self.layer, reading, self.shape, self.sizes, self.source)
        before = {name: buffer.clone() for name, buffer in self.layer.named_buffers()}
        with watched.calling():
            again = call_of(self.layer, (call.x, *call.further))
        if difference(call.y, again.y) > TOLERANCE:
            changed = changed_buffers(self.layer, before)
            because = f", because it changes {', '.join(changed)}" if changed else ""
            raise ParityError(
                f"{self.source} gives a different result each time it is called, even in eval "
                f"mode{because}",
                hint="add noise and change buffers in training only: if self.training",
            )
        what = f"trying {self.source} with {reading.words}"
        count = FormCount(self.progress, what, self.ends)
        return _Tried(Guess(self.layer, reading, call, self.source, count), watched)

    def _matching(self, one: _Tried) -> str | None:
        """The first text that matches every call; `one` records the near misses."""
        guess = one.guess
        tries = Tries(guess, self.sizes, one.watched)
        routed, soft = RoutedForms(guess), SoftForms(guess)
        limits, nearly = one.watched.limits, 0
        try:
            for text, form in self._candidates(routed, soft):
                if guess.off(text) > CLOSE:
                    continue
                fails = tries.fails(text)
                if fails is None:
                    return text
                one.nearly.append((text, *fails))
                for limited in self._limited(routed, soft, form, limits):
                    if guess.off(limited) <= CLOSE and tries.fails(limited) is None:
                        return limited
                nearly += 1
                if nearly == MOST_NEARLY:
                    break
            one.whole = True
        finally:  # even if the time is up
            one.right_experts, one.fits = routed.right_experts, routed.fits
        return None

    @staticmethod
    def _candidates(routed: RoutedForms, soft: SoftForms) -> Iterator[tuple[str, Any]]:
        """Yields texts that may match, with their forms."""
        yield from ((routed.text(form), form) for form in routed.matching())
        if not routed.right_experts:  # they take tokens, not slots
            yield from ((form.text, form) for form in soft.matching())

    @staticmethod
    def _limited(
        routed: RoutedForms, soft: SoftForms, form: Any, limits: Sequence[ClampBounds]
    ) -> Iterator[str]:
        """Yields the texts of a form with the limits that the layer's forward has."""
        for limit in limits:
            if isinstance(form, RoutedForm):
                yield from map(routed.text, form.limited(limit))
            else:
                yield from soft.limited(form, limit)

    def _notes(self, watched: WatchedForward) -> Iterator[str]:
        """Yields notes on parts of the layer's forward that no input reached."""
        for each in watched.unreached():
            yield f"no trial input reached {each}: check whether the adapter needs it"
        left = optional_inputs(self.layer)
        if left:
            yield f"the layer also accepts {', '.join(left)}: the adapter was tried without"

    def _nearly(self, one: _Tried) -> FirstAdapter:
        """The text that matches usual inputs, with the other operations of the layer."""
        text, words, off = one.nearly[0]
        also = one.watched.all_places()
        has = f"; its forward also has {'; '.join(also)}" if also else ""
        missing = (
            f"the adapter matches usual inputs, but is off by {off:.2g} of max|y| for {words}{has}"
        )
        comments = [f"# Incomplete: off by {off:.2g} of max|y| for {words}."]
        comments += [f"# Its forward also has {each}" for each in also]
        return FirstAdapter(self._whole("\n".join([*comments, text])), (missing,))

    def _whole(self, body: str, more: Sequence[str] = ()) -> str:
        """The module of an adapter: imports and the function."""
        name, where = type(self.layer).__name__, type(self.layer).__module__
        begins = f"from {where} import "
        own = [line.removeprefix(begins).split(", ") for line in more if line.startswith(begins)]
        names = sorted({name, *itertools.chain(*own)})
        imports = ["import moexport"]
        imports += ["import torch"] if "torch." in body else []
        imports += ["from torch.nn import functional as F"] if "F." in body else []
        imports += [line for line in more if not line.startswith(begins)]
        lines = [*dict.fromkeys(imports), f"{begins}{', '.join(names)}", "", ""]
        lines += [f"@moexport.adapts({name})", f"def adapt(layer: {name}):"]
        return "\n".join([*lines, joined(body.splitlines()), ""])


MOST_REPORTED = 2
"""Readings of the experts that are reported with their results."""

MOST_LISTED = 6


def _result(one: _Tried) -> str:
    """The result for a reading, in words."""
    guess = one.guess
    read, count = f"moexport read {guess.reading.words}", guess.count
    given = ", ".join(guess.further)
    around = "the code around the experts" + (f", with {given}" if given else "")
    if one.right_experts:
        return (
            f"{around}: {read}; their outputs are correct, but their weights were not "
            f"found ({count.forms} usual forms were tried)"
        )
    if count.nearest < inf:
        return (
            f"{around}: {read}; {count.forms} usual forms were tried, and the nearest is off by "
            f"{count.nearest:.2g} of max|y|"
        )
    if not one.whole:
        return f"{around}: {read}, but not all forms were tried"
    if not one.fits:
        x, y = list(guess.call.x.shape), list(guess.call.y.shape)
        return f"{around}: {read}, but no usual form returns {y} for {x}"
    others = [f"{code} {list(p.shape)}" for code, p in guess.others]
    listed = ", ".join([*others[:MOST_LISTED], *(["…"] if len(others) > MOST_LISTED else [])])
    return f"the router: {read}, but none of the other parameters fits one ({listed or 'none'})"
