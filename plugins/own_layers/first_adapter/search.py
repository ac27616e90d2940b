"""Finds a first adapter for a layer: reads its experts, and guesses the code around them.

Each guess is a text that runs like a user's adapter and is compared with the layer's result. If one
matches, it is the adapter. Otherwise the message names the part that was not recognised, and the
layer's own forward is the start of an adapter.
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
from ....data.user_code import build_network, callable_named
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
from .start import indent_lines, start_of

STACKED = "w1=, b1=, w2= and b2=, stacked: w1 is [n, in, hidden], w2 [n, hidden, out]"

MAX_NEAR = 4
"""The largest number of texts that match only usual inputs and are tried with limits."""


def first_adapter(source: str, request: AdaptRequest) -> FirstAdapter:
    """Returns an adapter for the layer that `package.module:Class` makes.

    Raises UsageError if the layer cannot be made or does not accept the requested sizes.
    """
    config, sizes = read_config(request.config, request.sets), request.sizes
    progress, seconds = request.progress or Silent(), request.seconds
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    torch.manual_seed(0)
    layer = build_network(source, "a layer", arguments, arguments_of(source))
    layer = layer.float().eval().requires_grad_(False)
    for parameter in layer.parameters():  # factors of 1 and terms of 0 hide operations
        if parameter.ndim < 2 or float(parameter.std()) == 0:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    key = key_of(layer, source, config, sizes)
    timed_key = f"{key[:24]}-{seconds:g}s"  # a search with another limit may find another adapter
    cached = cached_adapter(key) or cached_adapter(timed_key)
    if cached is not None:
        progress.step(f"using the result of an earlier search for {source}")
        return cached
    # The layers are small: several threads take longer than one, on a busy machine far longer.
    with with_threads(1):
        search = _Search(layer, config.get(INPUT_SHAPE), sizes, source, progress, seconds)
        found = search.result()
    store_adapter(timed_key if search.timed_out else key, found)
    return found


def arguments_of(source: str) -> str:
    """Returns a hint that lists the arguments of a layer's class and how to set them."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(callable_named(source, "a layer"))
    except (TypeError, ValueError):
        return "--set KEY=VALUE sets its arguments"
    parameters = [each for each in signature.parameters.values() if each.kind in kinds]
    if not parameters:
        return f"{source} takes no named arguments"
    required = [each.name for each in parameters if each.default is Parameter.empty]
    listed = ", ".join(str(each.replace(annotation=Parameter.empty)) for each in parameters)
    options = " ".join(f"--set {name}=…" for name in required or [parameters[0].name])
    return f"it takes {listed}: {options}"


@dataclass(slots=True)
class _Result:
    """The result for one reading of the experts.

    `complete`: all forms were tried. Each entry of `near` is a text that matches usual inputs,
    other inputs that it does not match, and its error for these.
    """

    guess: Guess
    watched: WatchedForward
    routed: RoutedForms
    complete: bool = False
    near: list[tuple[str, str, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Search:
    """The search for a layer's adapter, which tries the readings of its experts in turn."""

    layer: nn.Module
    shape: object
    sizes: TriedSizes
    source: str
    progress: Progress
    seconds: float
    timed_out: bool = False
    deadline: float = inf

    def result(self) -> FirstAdapter:
        """Returns the first guess that matches, or a start that names the missing part."""
        self.deadline = process_time() + self.seconds
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
                result = self._prepare(reading)
                results.append(result)
                found = self._matching(result)
            except (UsageError, ParityError) as error:
                if self.sizes.required_batches or self.sizes.required_tokens:
                    raise  # the layer may accept other sizes
                refused = refused or error
                continue
            except OutOfTimeError:
                self.timed_out = True
                break
            if found is not None:
                return FirstAdapter(self._module(found), (), tuple(self._notes(result.watched)))
        why = [] if refused is None or results else [f"{refused.message} ({refused.hint})"]
        if self.timed_out:
            forms = sum(result.guess.count.forms for result in results)
            why.append(
                f"the search ended after {self.seconds:g} s of CPU time and {forms} forms, none of "
                f"which matches: --time {2 * self.seconds:g}s searches longer"
            )
        near = next((result for result in results if result.near), None)
        best = self._incomplete(results, readings) if near is None else self._near(near)
        return replace(best, missing=(*why, *best.missing))

    def _incomplete(
        self, results: Sequence[_Result], readings: Sequence[ExpertsReading]
    ) -> FirstAdapter:
        """Returns the layer's own forward as a start, and why no adapter was found."""
        fit = (each for each in readings if each.problem is None)
        reading = results[0].guess.reading if results else next(fit, readings[0])
        missing = [*map(_describe, results)]
        missing += [f"the experts: {each.problem}" for each in readings if each.problem is not None]
        code = self._own_forward(reading.keywords, reading.uses)
        return FirstAdapter(code, tuple(missing[:MAX_REPORTED]))

    def _bare_start(self, error: FamilyError) -> FirstAdapter:
        """Returns the layer's own forward if no part of the layer was recognised as experts."""
        names = [name.partition(".")[0] for name, _ in self.layer.named_parameters()]
        likely = [name for name in names if "expert" in name.lower()]
        if not likely:
            likely = [n for n in names if not any(word in n.lower() for word in ("gate", "rout"))]
        advice = (f"# Name the experts: {PAIRS};", f"# or {STACKED}.")
        code = self._own_forward("experts=[...]", frozenset(likely), advice)
        return FirstAdapter(code, (error.message,))

    def _own_forward(self, experts: str, uses: frozenset[str], advice: Sequence[str] = ()) -> str:
        """Returns an adapter with the layer's own forward, and marks the lines with experts."""
        start = start_of(self.layer, uses)
        lines = [*start.before, f"def forward({start.parameters}):", indent_lines(start.lines), ""]
        call = call_text("moexport.Experts", [experts, "forward=forward"])
        return self._module("\n".join([*lines, *advice, call]), start.imports)

    def _prepare(self, reading: ExpertsReading) -> _Result:
        """Returns a reading with a call that the layer accepts; raises UsageError without one."""
        watched = WatchedForward(self.layer)
        call = first_call(self.layer, reading, self.shape, self.sizes, self.source)
        before = {name: buffer.clone() for name, buffer in self.layer.named_buffers()}
        with watched.recording():
            repeated = call_of(self.layer, (call.x, *call.extra_args))
        if difference(call.y, repeated.y) > TOLERANCE:
            changed = changed_buffers(self.layer, before)
            because = f", because it changes {', '.join(changed)}" if changed else ""
            raise random_result_error(self.source, because)
        what = f"trying {self.source} with {reading.words}"
        count = FormCount(self.progress, what, self.deadline)
        guess = Guess(self.layer, reading, call, self.source, count)
        return _Result(guess, watched, RoutedForms(guess))

    def _matching(self, result: _Result) -> str | None:
        """Returns the first text that matches all calls; adds near misses to `result`."""
        guess = result.guess
        further_calls = FurtherCalls(guess, self.sizes, result.watched)
        for text, with_limit in self._candidates(result.routed, SoftForms(guess)):
            if guess.error_of(text) > CLOSE:
                continue
            mismatch = further_calls.mismatch(text)
            if mismatch is None:
                return text
            result.near.append((text, *mismatch))
            for limit in result.watched.limits:
                for other in with_limit(limit):
                    if guess.error_of(other) <= CLOSE and further_calls.mismatch(other) is None:
                        return other
            if len(result.near) == MAX_NEAR:
                break
        result.complete = True
        return None

    @staticmethod
    def _candidates(
        routed: RoutedForms, soft: SoftForms
    ) -> Iterator[tuple[str, Callable[[Bounds], Iterator[str]]]]:
        """Yields texts that may match, each with a function that adds a limit to the text."""
        for form in routed.matching():
            yield routed.text(form), partial(routed.with_limit, form)
        if not routed.right_experts:  # which take tokens, not slots
            yield from ((form.text, partial(soft.with_limit, form)) for form in soft.matching())

    def _notes(self, watched: WatchedForward) -> Iterator[str]:
        """Yields notes on parts of the layer's forward that no input reached."""
        for each in watched.unreached():
            yield f"no trial input reached {each}: check whether the adapter needs it"
        untried = optional_inputs(self.layer)
        if untried:
            names = " and ".join(untried)
            yield f"the layer also accepts {names}, which no trial passed"

    def _near(self, result: _Result) -> FirstAdapter:
        """Returns a text that matches only usual inputs, and what else the layer does."""
        text, words, off = result.near[0]
        lines, error = result.watched.all_lines(), f"off by {off:.2g} of max|y| for {words}"
        others = f"; the layer's forward also has {'; '.join(lines)}" if lines else ""
        missing = f"the adapter matches usual inputs, but is {error}{others}"
        comments = [f"# Incomplete: {error}."]
        comments += [f"# The layer's forward also has {line}" for line in lines]
        return FirstAdapter(self._module("\n".join([*comments, text])), (missing,))

    def _module(self, body: str, more: Sequence[str] = ()) -> str:
        """Returns the module of an adapter, with its imports, among them `more`."""
        name, where = type(self.layer).__name__, type(self.layer).__module__
        prefix = f"from {where} import "
        own = [line.removeprefix(prefix).split(", ") for line in more if line.startswith(prefix)]
        names = sorted({name, *itertools.chain(*own)})
        imports = ["import moexport"]
        imports += ["import torch"] if "torch." in body else []
        imports += ["from torch.nn import functional as F"] if "F." in body else []
        imports += [line for line in more if not line.startswith(prefix)]
        lines = [*dict.fromkeys(imports), f"{prefix}{', '.join(names)}", "", ""]
        lines += [f"@moexport.adapts({name})", f"def adapt(layer: {name}):"]
        return "\n".join([*lines, indent_lines(body.splitlines()), ""])


MAX_REPORTED = 2
"""The largest number of readings whose results are reported."""

MAX_LISTED = 6


def _describe(result: _Result) -> str:
    """Describes the result of a reading."""
    guess = result.guess
    read, count = f"moexport read {guess.reading.words}", guess.count
    given = ", ".join(guess.extra_inputs)
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
    others = [f"{code} {list(p.shape)}" for code, p in guess.other_parameters]
    listed = ", ".join([*others[:MAX_LISTED], *(["…"] if len(others) > MAX_LISTED else [])])
    return f"the router: {read}, but no other parameter fits a router ({listed or 'none'})"
