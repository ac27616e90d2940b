"""Explains how a layer differs from its description, by trying other options, parts and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, isnan

import torch
from torch import Tensor, nn

from ...errors import MoexportError, ParityError
from ..token_routed.own_forward import Tried, result_of
from .adapters import PAGE
from .calls import LayerCall
from .descriptions import Description, ExpertsDescription, LayerContents, SoftMoEDescription

TOLERANCE = 1e-4
"""The largest accepted difference from the user's forward, as a fraction of max|y|, in float32."""

CLOSE = 1e-5
"""If a layer differs by more, other options may fit better, so they are tried."""

TRIED_INPUTS = 8

MAX_TOKENS, MAX_WEIGHTS, ZERO = 64, 4, 1e-3
"""The largest numbers of tokens to examine and of weights to list for one, and the largest weight
that counts as zero."""

MAX_OPTIONS = 6
"""The largest number of options whose error is listed."""

DescribedRun = Callable[[Description, LayerCall], Tensor]
"""Returns what a description computes for a call."""


def difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference as a fraction of max|expected|; NaN counts as infinite."""
    largest = float(expected.abs().max())
    error = float((expected - actual).abs().max())
    if error == 0:
        return 0.0
    share = error / largest if largest else inf
    return inf if isnan(share) else share


@dataclass(frozen=True, slots=True)
class _Trial:
    """Changed options, and their errors for y (`off`) and for y without the best addend.

    `added` describes that addend: whether x is in it, and the name of the part whose output is.
    """

    changed: dict[str, str]
    off: float = inf
    added: tuple[bool, str] = (False, "")
    off_without: float = inf


def mismatch(
    description: Description,
    call: LayerCall,
    run: DescribedRun,
    layer: LayerContents,
    outputs: Mapping[str, Tensor],
    at: str,
) -> ParityError | None:
    """Returns an error that explains how a layer differs from its adapter; None if they agree.

    `layer` is the contents of the user's layer, and `outputs` are the outputs in this call of its
    parts that have the shape of y. The message begins with `at`.
    """
    off = difference(call.y, run(description, call))
    if description.code is None:
        count = slice(TRIED_INPUTS)
        call = replace(call, args=(call.x[count], *call.extra_args), y=call.y[count])
        outputs = {name: values[count] for name, values in outputs.items()}
    trials = _all_trials(description, call, run, layer, outputs)
    unchanged = next(trial.off for trial in trials if not trial.changed)
    closer = [trial for trial in trials if trial.off <= min(TOLERANCE, unchanged / 10)]
    if off <= TOLERANCE and not closer:
        return None
    prefix = f"{at} does not match its adapter: off by {_format_share(off)} of max|y|"
    return (
        (_other_options(prefix, closer) if closer else None)
        or _added_term(prefix, trials, description)
        or _different_input(prefix, description, call, run, outputs)
        or _other_weights(prefix, description, call)
        or _no_match(prefix, trials, description, outputs)
    )


def _all_trials(
    description: Description,
    call: LayerCall,
    run: DescribedRun,
    layer: LayerContents,
    outputs: Mapping[str, Tensor],
) -> list[_Trial]:
    """Tries changed options, the fewest first; stops at a number of changes with a match."""
    trials: list[_Trial] = []
    addends = list(_addends(call, outputs))
    variants = sorted(description.variants(layer), key=lambda variant: len(variant[0]))
    for _, group in groupby(variants, key=lambda variant: len(variant[0])):
        for changed, variant in group:
            try:
                ours = run(variant, call)
            except (MoexportError, RuntimeError):
                if not changed:
                    raise
                continue  # these weights cannot be read in this way
            if ours.shape != call.y.shape:
                trials.append(_Trial(changed))
                continue
            without = [(difference(call.y - value, ours), added) for added, value in addends]
            off_without, added = min(without, default=(inf, (False, "")))
            trials.append(_Trial(changed, difference(call.y, ours), added, off_without))
        if any(min(trial.off, trial.off_without) <= CLOSE for trial in trials):
            break
    return trials


def _addends(
    call: LayerCall, outputs: Mapping[str, Tensor]
) -> Iterator[tuple[tuple[bool, str], Tensor]]:
    """Yields what a layer may add to its experts' sum: its input, outputs of its parts, or both."""
    own = [call.x] if call.x.shape == call.y.shape else []
    yield from (((True, ""), x) for x in own)
    for name, part in outputs.items():
        yield (False, name), part
        yield from (((True, name), x + part) for x in own)


def _other_options(prefix: str, closer: Sequence[_Trial]) -> ParityError:
    limit = max(10 * min(trial.off for trial in closer), CLOSE)
    fitting = [trial.changed for trial in closer if trial.off <= limit]
    fewest = [_list_options(changes) for changes in fitting if len(changes) == len(fitting[0])]
    return ParityError(
        f"{prefix}; it matches with {' or with '.join(fewest[:3])}",
        hint=f"moexport.SoftMoE has no such option: use moexport.Experts with a forward ({PAGE})"
        if any("softmax" in key for key in fitting[0])
        else "use these options in the adapter if they describe the layer",
    )


def _added_term(
    prefix: str, trials: Sequence[_Trial], description: Description
) -> ParityError | None:
    """Returns the explanation if the layer adds its input or the output of a part."""
    trial = next((candidate for candidate in trials if candidate.off_without <= TOLERANCE), None)
    if trial is None:
        return None
    adds_x, part = trial.added
    words = ["x"] * adds_x + [f"what layer.{part} returns"] * bool(part)
    summed = " + ".join(["x"] * adds_x + [f"layer.{part}(…)"] * bool(part))
    both = len(words) > 1
    adds = "both" if both else "it" if part else "its input"
    if isinstance(description, SoftMoEDescription) and description.code is None:
        forward = f"a forward that adds it: forward=lambda moe, x: moe(x) + layer.{part}(…)"
        hints = ["residual=True in the adapter"] * adds_x + [forward] * bool(part)
        hint = ", and ".join(hints)
    elif description.code is not None and description.code.router is not None:
        hint = f"replace the router with a forward: return {summed} + experts(x, *layer.route(x))"
    else:
        hint = f"add it in the adapter's forward: return {summed} + experts(…)"
    return ParityError(
        f"{prefix}; it matches with {_list_options(trial.changed)} once {' and '.join(words)} "
        f"{'are' if both else 'is'} subtracted from y: the layer adds {adds}",
        hint=hint,
    )


def _different_input(
    prefix: str,
    description: Description,
    call: LayerCall,
    run: DescribedRun,
    outputs: Mapping[str, Tensor],
) -> ParityError | None:
    """Returns the explanation if the input of the experts is the output of a part."""
    own = isinstance(description, SoftMoEDescription) and description.code is None
    plain = description
    if isinstance(description, SoftMoEDescription):
        plain = replace(description, norm="none", eps=None, gain=None, shift=None)
    for name, h in outputs.items():
        if h.shape != call.x.shape:
            continue
        ours = run(plain, replace(call, args=(h, *call.extra_args)))
        if ours.shape != call.y.shape:
            continue
        # The layer may add nothing, x, or x where the description adds h.
        added = (0 * h, call.x, call.x - h)
        if min(difference(call.y - x, ours) for x in added) > TOLERANCE:
            continue
        return ParityError(
            f"{prefix}; it matches if its input is what layer.{name} returns, not x",
            hint=f"norm=layer.{name} in the adapter"
            if own
            else f"in the adapter's forward: experts(layer.{name}(x), …)",
        )
    return None


def _other_weights(prefix: str, description: Description, call: LayerCall) -> ParityError | None:
    """Returns the explanation if the experts are correct, but y needs other weights."""
    if not isinstance(description, ExpertsDescription) or description.weights_on != "output":
        return None
    bank = Tried(description)
    ours = result_of(description.code.run(bank, *call.copy_args()))
    terms = bank.terms(MAX_TOKENS)
    if ours is None or terms is None or ours.shape != call.y.shape:
        return None
    outputs, weights = (term.double() for term in terms)  # [t, c, o] and [t, c]
    missing = (call.y - ours).reshape(-1, outputs.shape[-1])[: len(outputs)].double()
    fitting = weights_that_fit(outputs, torch.einsum("tc,tco->to", weights, outputs) + missing)
    if fitting is None:
        return None
    token = int((fitting - weights).abs().amax(1).argmax())
    actual, needed = (_list_weights(values[token]) for values in (weights, fitting))
    return ParityError(
        f"{prefix}; its experts are correct, but their weights are not: token {token} "
        f"has {actual}, but y needs {needed}",
        hint="check how the adapter computes the weights: the axis of a softmax, a temperature, a "
        "bias or a norm before the router, weights divided by their sum",
    )


def weights_that_fit(outputs: Tensor, target: Tensor) -> Tensor | None:
    """Returns the weights [t, c] with which outputs [t, c, o] sum to a target [t, o].

    Examines the first `MAX_TOKENS` tokens. None if no weights fit, or if some fit any target.
    """
    outputs, target = outputs[:MAX_TOKENS].double(), target[:MAX_TOKENS].double()
    if not len(outputs) or outputs.shape[1] >= outputs.shape[2]:
        return None
    # The smallest weights, in case some experts' outputs are equal.
    weights = (torch.linalg.pinv(outputs.mT) @ target.unsqueeze(-1)).squeeze(-1)
    off = difference(target, torch.einsum("tc,tco->to", weights, outputs))
    return weights if off <= TOLERANCE else None


def _list_weights(weights: Tensor) -> str:
    """Returns the largest weights of a token, with the experts' numbers, for messages."""
    largest = weights.abs().topk(min(MAX_WEIGHTS, len(weights))).indices.tolist()
    terms = [f"{float(weights[i]):.3g} of {i}" for i in largest if abs(weights[i]) > ZERO]
    return ", ".join(terms).replace("of ", "of expert ", 1) or "none"


def _no_match(
    prefix: str, trials: Sequence[_Trial], description: Description, outputs: Mapping[str, Tensor]
) -> ParityError:
    single: dict[str, _Trial] = {}
    for trial in sorted(trials, key=lambda trial: trial.off):
        keys = trial.changed.keys() - {"eps"} or trial.changed.keys()
        if len(keys) == 1:  # with the best eps
            single.setdefault(next(iter(keys)), trial)
    shown = [*single.values()][:MAX_OPTIONS]
    errors = ", ".join(
        f"{_list_options(trial.changed)}: {_format_share(trial.off)}" for trial in shown
    )
    code = description.code
    parts = ", ".join(f"layer.{name}" for name in outputs if "." not in name)
    missing = code is None or code.router is not None  # a forward would run the parts
    missing &= not isinstance(getattr(description, "norm", None), nn.Module)
    extra = f"the layer also runs {parts}, which needs a forward; " if parts and missing else ""
    return ParityError(
        f"{prefix}; none of {len(trials)} combinations of options matches ({errors})",
        hint=f"{extra}{description.advice} ({PAGE})",
    )


def _list_options(changed: Mapping[str, str]) -> str:
    if not changed:
        return "the options as they are"
    separators = {True: " ", False: "="}  # keys with spaces are prose
    return ", ".join(f"{key}{separators[' ' in key]}{value}" for key, value in changed.items())


def _format_share(share: float) -> str:
    return f"{share:.2g}" if share >= 0.01 else f"{share:.0e}"
