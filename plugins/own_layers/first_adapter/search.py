"""A first adapter for a layer: reads its experts, and guesses the computation around them.

Each guess is a text that runs like a user's adapter and is compared with the layer's result. One
that matches is the adapter; without one, the message names the part that was not recognised, and
the layer's own forward is the start of an adapter.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter
from math import inf
from time import process_time

import torch
from torch import nn

from ....common.console import Progress, Silent
from ....common.threads import with_threads
from ....data.user_code import callable_named, module_made
from ....errors import FamilyError, ParityError, UsageError
from ....exporter.checkpoints.settings import read_config
from ..calls import changed_buffers
from ..comparison import random_result_error
from ..examples import INPUT_SHAPE
from ..expert_forms import PAIRS
from ..mismatch import CLOSE, TOLERANCE, difference
from .cache import FirstAdapter, cached_adapter, key_of, store_adapter
from .coverage import Bounds, WatchedForward
from .forms import FormCount, Guess, OutOfTimeError, RoutedForms, call_text
from .further_calls import FurtherCalls
from .readings import ExpertsReading, call_of, first_call, optional_inputs, readings_of
from .request import AdaptRequest, TriedSizes
from .soft_forms import SoftForms
from .start import joined, start_of

STACKED = "w1=, b1=, w2= and b2=, stacked: w1 is [n, in, hidden], w2 [n, hidden, out]"

MOST_NEAR = 4
"""Texts that match usual inputs alone, and are tried with limits that the layer has."""


def first_adapter(source: str, request: AdaptRequest) -> FirstAdapter:
    """Returns an adapter for the layer that `package.module:Class` makes.

    Raises UsageError if the layer cannot be made or does not accept the requested sizes.
    """
    config, sizes = read_config(request.config, request.sets), request.sizes
    progress, seconds = request.progress or Silent(), request.seconds
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    torch.manual_seed(0)
    layer = module_made(source, "a layer", arguments, arguments_of(source))
    layer = layer.float().eval().requires_grad_(False)
    for parameter in layer.parameters():  # zeros and ones hide what multiplies and adds
        if parameter.ndim < 2 or float(parameter.std()) == 0:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    key = key_of(layer, source, config, sizes)
    ended = f"{key[:24]}-{seconds:g}s"  # another limit may find another adapter
    known = cached_adapter(key) or cached_adapter(ended)
    if known is not None:
        progress.step(f"using the result of an earlier search of {source}")
        return known
    # The layers are small: more threads than one take longer, on a busy machine far longer.
    with with_threads(1):
        search = _Search(layer, config.get(INPUT_SHAPE), sizes, source, progress, seconds)
        found = search.result()
    store_adapter(ended if search.ended else key, found)
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


@dataclass(slots=True)
class _Result:
    """The result for one reading of the experts.

    `complete`: all forms were tried. `near` are texts that match usual inputs, with the inputs that
    they do not match and how far off they are for them.
    """

    guess: Guess
    watched: WatchedForward
    routed: RoutedForms
    complete: bool = False
    near: list[tuple[str, str, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Search:
    """The guesses for one layer, one reading of its experts after the other."""

    layer: nn.Module
    shape: object
    sizes: TriedSizes
    source: str
    progress: Progress
    seconds: float
    ended: bool = False
    ends: float = inf

    def result(self) -> FirstAdapter:
        """Returns the first guess that matches, or a start that names the missing part."""
        self.ends = process_time() + self.seconds
        try:
            readings = readings_of(self.layer)
        except FamilyError as error:
            return self._bare_start(error)
        results: list[_Result] = []
        refused: UsageError | ParityError | None = None
        for reading in readings:
            if reading.problem is not None:
                continue
            try:
                result = self._guess(reading)
                results.append(result)
                found = self._matching(result)
            except (UsageError, ParityError) as error:
                if self.sizes.required_batches or self.sizes.required_tokens:
                    raise  # the layer may accept other sizes
                refused = refused or error
                continue
            except OutOfTimeError:
                self.ended = True
                break
            if found is not None:
                return FirstAdapter(self._module(found), (), tuple(self._notes(result.watched)))
        why = [] if refused is None or results else [f"{refused.message} ({refused.hint})"]
        if self.ended:
            forms = sum(result.guess.count.forms for result in results)
            why.append(
                f"the search ended after {self.seconds:g} s of CPU time and {forms} forms, none of "
                f"which matches: --time {2 * self.seconds:g}s searches longer"
            )
        near = next((result for result in results if result.near), None)
        best = self._start(results, readings) if near is None else self._near(near)
        return replace(best, missing=(*why, *best.missing))

    def _start(
        self, results: Sequence[_Result], readings: Sequence[ExpertsReading]
    ) -> FirstAdapter:
        """The layer's own forward as a start, and why nothing better was found."""
        fit = (each for each in readings if each.problem is None)
        reading = results[0].guess.reading if results else next(fit, readings[0])
        missing = [*map(_described, results)]
        missing += [f"the experts: {each.problem}" for each in readings if each.problem is not None]
        code = self._own_forward(reading.keywords, reading.uses)
        return FirstAdapter(code, tuple(missing[:MOST_REPORTED]))

    def _bare_start(self, error: FamilyError) -> FirstAdapter:
        """The layer's own forward if no part of it was recognised as its experts."""
        names = [name.partition(".")[0] for name, _ in self.layer.named_parameters()]
        likely = [name for name in names if "expert" in name.lower()]
        if not likely:
            likely = [n for n in names if not any(word in n.lower() for word in ("gate", "rout"))]
        advice = (f"# Name the experts: {PAIRS};", f"# or {STACKED}.")
        code = self._own_forward("experts=[...]", frozenset(likely), advice)
        return FirstAdapter(code, (error.message,))

    def _own_forward(self, experts: str, uses: frozenset[str], advice: Sequence[str] = ()) -> str:
        """An adapter with the layer's own forward, the lines with its experts marked."""
        start = start_of(self.layer, uses)
        lines = [*start.before, f"def forward({start.parameters}):", joined(start.lines), ""]
        call = call_text("moexport.Experts", [experts, "forward=forward"])
        return self._module("\n".join([*lines, *advice, call]), start.imports)

    def _guess(self, reading: ExpertsReading) -> _Result:
        """A reading with a call that the layer accepts; raises UsageError if there is none."""
        watched = WatchedForward(self.layer)
        call = first_call(self.layer, reading, self.shape, self.sizes, self.source)
        before = {name: buffer.clone() for name, buffer in self.layer.named_buffers()}
        with watched.calling():
            again = call_of(self.layer, (call.x, *call.further))
        if difference(call.y, again.y) > TOLERANCE:
            changed = changed_buffers(self.layer, before)
            because = f", because it changes {', '.join(changed)}" if changed else ""
            raise random_result_error(self.source, because)
        what = f"trying {self.source} with {reading.words}"
        count = FormCount(self.progress, what, self.ends)
        guess = Guess(self.layer, reading, call, self.source, count)
        return _Result(guess, watched, RoutedForms(guess))

    def _matching(self, result: _Result) -> str | None:
        """The first text that matches every call; `result` records the near misses."""
        guess = result.guess
        further_calls = FurtherCalls(guess, self.sizes, result.watched)
        for text, limited in self._candidates(result.routed, SoftForms(guess)):
            if guess.off(text) > CLOSE:
                continue
            fails = further_calls.fails(text)
            if fails is None:
                return text
            result.near.append((text, *fails))
            for limit in result.watched.limits:
                for other in limited(limit):
                    if guess.off(other) <= CLOSE and further_calls.fails(other) is None:
                        return other
            if len(result.near) == MOST_NEAR:
                break
        result.complete = True
        return None

    @staticmethod
    def _candidates(
        routed: RoutedForms, soft: SoftForms
    ) -> Iterator[tuple[str, Callable[[Bounds], Iterator[str]]]]:
        """Yields texts that may match, each with a function for its texts with a limit."""
        for form in routed.matching():
            yield routed.text(form), partial(routed.limited, form)
        if not routed.right_experts:  # they take tokens, not slots
            yield from ((form.text, partial(soft.limited, form)) for form in soft.matching())

    def _notes(self, watched: WatchedForward) -> Iterator[str]:
        """Yields notes on parts of the layer's forward that no input reached."""
        for each in watched.unreached():
            yield f"no trial input reached {each}: check whether the adapter needs it"
        left = optional_inputs(self.layer)
        if left:
            yield f"the layer also accepts {', '.join(left)}: the adapter was tried without"

    def _near(self, result: _Result) -> FirstAdapter:
        """The text that matches usual inputs, with the other operations of the layer."""
        text, words, off = result.near[0]
        also = result.watched.all_places()
        has = f"; its forward also has {'; '.join(also)}" if also else ""
        missing = (
            f"the adapter matches usual inputs, but is off by {off:.2g} of max|y| for {words}{has}"
        )
        comments = [f"# Incomplete: off by {off:.2g} of max|y| for {words}."]
        comments += [f"# Its forward also has {each}" for each in also]
        return FirstAdapter(self._module("\n".join([*comments, text])), (missing,))

    def _module(self, body: str, more: Sequence[str] = ()) -> str:
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


def _described(result: _Result) -> str:
    """The result for a reading, in words."""
    guess = result.guess
    read, count = f"moexport read {guess.reading.words}", guess.count
    given = ", ".join(guess.further)
    around = "the code around the experts" + (f", with {given}" if given else "")
    if result.routed.right_experts:
        return (
            f"{around}: {read}; their outputs are correct, but their weights were not "
            f"found ({count.forms} usual forms were tried)"
        )
    if count.nearest < inf:
        return (
            f"{around}: {read}; {count.forms} usual forms were tried, and the nearest is off by "
            f"{count.nearest:.2g} of max|y|"
        )
    if not result.complete:
        return f"{around}: {read}, but not all forms were tried"
    if not result.routed.fits:
        x, y = list(guess.call.x.shape), list(guess.call.y.shape)
        return f"{around}: {read}, but no usual form returns {y} for {x}"
    others = [f"{code} {list(p.shape)}" for code, p in guess.others]
    listed = ", ".join([*others[:MOST_LISTED], *(["…"] if len(others) > MOST_LISTED else [])])
    return f"the router: {read}, but none of the other parameters fits one ({listed or 'none'})"
