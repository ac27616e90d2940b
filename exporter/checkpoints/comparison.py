"""Whether our layers compute what a user's own do: alone, as described, and in the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isnan

import torch
from torch import Tensor, nn

from ...errors import FamilyError, MoexportError, ParityError, UsageError
from ..families.layer_only import PixelBackbone, TokenBackbone, VectorBackbone
from ..token_routed.own_router import check_experts, routing
from .adapters import EXAMPLE, PAGE
from .calls import ForwardPass, LayerCall, forward_pass
from .descriptions import Description, ExpertsDescription
from .examples import differ, made_up
from .layers import LayerPlace

TOLERANCE = 1e-4
"""Largest difference from the user's own forward, as a fraction of max|y|, in float32."""

CLOSE = 1e-5
"""A layer that is further off than this may be another one: the other options are tried, too."""

TRIED_INPUTS = 8


def difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference as a fraction of max|expected|; NaN is infinite."""
    largest = float(expected.abs().max())
    error = float((expected - actual).abs().max())
    if error == 0:
        return 0.0
    share = error / largest if largest else inf
    return inf if isnan(share) else share


def _check_described(
    description: Description,
    x: Tensor,
    y: Tensor,
    run: Callable[[nn.Module, Tensor], Tensor],
    at: str,
    most: int = TRIED_INPUTS,
) -> None:
    """Raises ParityError unless what was described gives y, where the user's layer gave it, for x.

    `run` calls a layer on x, or the first `most` of it, in the layout that the user's has. `at`
    begins the message.
    """
    with torch.no_grad():
        ours = run(description.build(""), x)
        if ours.shape != y.shape:
            raise ParityError(
                f"{at} gives {list(y.shape)} for {list(x.shape)}, and what its adapter says gives "
                f"{list(ours.shape)}",
                hint="are the experts' last weights those of another layer, or transposed?",
            )
        off = difference(y, ours)
        if off <= CLOSE:
            return
        tried = _tried(description, x[:most], y[:most], run)
    if off <= TOLERANCE and not _closer(tried):
        return
    raise _mismatch(at, off, tried, description.advice)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Options that were changed, and how far off y then is, as it is and with x taken from it."""

    changed: dict[str, str]
    off: float
    off_without_x: float


def _tried(
    description: Description, x: Tensor, y: Tensor, run: Callable[[nn.Module, Tensor], Tensor]
) -> list[_Trial]:
    """Every combination of the options, the fewest changes first."""
    trials = []
    for changed, variant in description.variants():
        ours = run(variant.build(""), x)
        without_x = difference(y - x, ours) if x.shape == y.shape else inf
        off = difference(y, ours)
        trials.append(_Trial(changed=changed, off=off, off_without_x=without_x))
    return sorted(trials, key=lambda trial: len(trial.changed))


def _closer(tried: Sequence[_Trial]) -> list[_Trial]:
    """Those that match, and far better than the description as it is."""
    as_it_is = next(trial.off for trial in tried if not trial.changed)
    return [trial for trial in tried if trial.off <= min(TOLERANCE, as_it_is / 10)]


def _mismatch(at: str, off: float, tried: Sequence[_Trial], advice: str) -> ParityError:
    """What to say of a layer that is not what its adapter says: which options match, or none."""
    begins = f"{at} does not match its adapter: off by {_share(off)} of max|y|"
    closer = _closer(tried)
    if closer:
        limit = max(10 * min(trial.off for trial in closer), CLOSE)
        fitting = [trial.changed for trial in closer if trial.off <= limit]
        fewest = [_said(each) for each in fitting if len(each) == len(fitting[0])]
        return ParityError(
            f"{begins}; it matches with {' or with '.join(fewest[:3])}",
            hint="use these options in the adapter if they describe the layer",
        )
    added = min(tried, key=lambda trial: trial.off_without_x)
    if added.off_without_x <= TOLERANCE:
        fitting = [trial.changed for trial in tried if trial.off_without_x <= TOLERANCE]
        return ParityError(
            f"{begins}; it matches with {_said(fitting[0])} once x is taken from y: the layer "
            "adds its input",
            hint="move that addition out of the layer: x + layer(x) in the module that calls it",
        )
    nearest = min(tried, key=lambda trial: trial.off)
    single: dict[tuple[tuple[str, str], ...], _Trial] = {}
    for trial in sorted(tried, key=lambda trial: trial.off):
        keys = trial.changed.keys() - {"eps"} or trial.changed.keys()
        if len(keys) == 1:  # with the eps that goes with it best
            single.setdefault(tuple((key, trial.changed[key]) for key in keys), trial)
    shown = [*single.values()] if nearest in single.values() else [*single.values(), nearest]
    listed = ", ".join(f"{_said(each.changed)}: {_share(each.off)}" for each in shown)
    return ParityError(
        f"{begins}; none of {len(tried)} combinations of options matches ({listed})",
        hint=f"{advice}; is a weight transposed? ({PAGE})",
    )


def _said(changed: Mapping[str, str]) -> str:
    if not changed:
        return "the options as they are"
    return ", ".join(f"{key}={value}" for key, value in changed.items())


def _share(share: float) -> str:
    return f"{share:.2g}" if share >= 0.01 else f"{share:.0e}"


TRIED_ALONE = 4


def check_alone(place: LayerPlace, layer: nn.Module, call: LayerCall, source: str) -> None:
    """Raises ParityError where what a layer gives for an input depends on the others of its batch.

    Ours never does. What a user's router does is part of the graph, and compared with that.
    """
    if place.routed is not None:
        return
    x = call.x if differ(call.x) else torch.cat([call.x, *islice(made_up(call.x), 1)])
    together = _numbers(layer, x)
    if together is None or together.shape[:1] != x.shape[:1]:
        return
    rows = sorted({*torch.linspace(0, len(x) - 1, TRIED_ALONE).long().tolist()})
    alone = []
    for row in rows:
        # Twice, where the layer takes no batch of one.
        batches = (x[[row]], x[[row, row]])
        y = next((y for each in batches if (y := _numbers(layer, each)) is not None), None)
        if y is None or y[:1].numel() != together[:1].numel():
            return
        alone.append(y[:1].reshape(together[:1].shape))
    off = difference(together[rows], torch.cat(alone))
    if off <= TOLERANCE:
        return
    again = _numbers(layer, x)
    if again is None or difference(together, again) > TOLERANCE:
        raise ParityError(
            f"{source}: {place.at} gives another result each time that it is called",
            hint="noise belongs into training alone: if self.training",
        )
    raise ParityError(
        f"{source}: {place.at} gives for one input what depends on the others of its batch: off by "
        f"{off:.2g} of max|y| from what it gives for the input alone",
        hint="no softmax, sum, statistics or reshape of the layer may reach over its first axis: a "
        "batch would change every result",
    )


def _numbers(layer: nn.Module, x: Tensor) -> Tensor | None:
    """What a layer gives for x outside of its network; None where it gives no numbers there."""
    with torch.no_grad():
        try:
            y = layer(x.clone())
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return None
    return y if isinstance(y, Tensor) and bool(y.isfinite().all()) else None


def check_adapter(place: LayerPlace, one_pass: ForwardPass, source: str) -> None:
    """Raises ParityError unless what an adapter says gives y for x, as the layer did."""
    call = one_pass.layers.get(place.path)
    if place.description is None or call is None:
        return
    at = f"{source}: {place.at}" + (", which changes its input in place," if call.in_place else "")
    if place.routed is not None:
        _check_routed(place.routed, call, at)
        return
    x, y = call.x, call.y
    spec, backbone = place.make("").spec, surroundings(place.path, call)
    ranks = (2, 3, 4) if spec.routes_tokens else (3, 4)
    if x.ndim not in ranks or x.shape[1 if backbone is PixelBackbone else -1] != spec.dim:
        raise UsageError(
            f"{source}: {place.at} is called on {list(x.shape)}, and what its adapter says takes "
            f"tokens (b, m, {spec.dim}) or pixels (b, {spec.dim}, height, width)",
            hint="phi is [d, n, p], a gate [d, n]: d is the width of a token",
        )

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = (backbone(layer) if backbone else layer)(x)
        return result

    _check_described(place.description, x, y, run, at)


TRIED_TOKENS = 256
"""On which the other options are tried: each meets some experts only."""


def _check_routed(description: ExpertsDescription, call: LayerCall, at: str) -> None:
    """Raises ParityError unless the experts give y for x and what the router chose."""
    d, n = (spec := description.build("").spec).dim, spec.experts
    if call.x.ndim < 2 or call.x.shape[-1] != d:
        raise UsageError(
            f"{at} is called on {list(call.x.shape)}, and its experts take tokens (…, {d})",
            hint="a first map is an nn.Linear or [h, d], w1 is [n, d, h]: d is a token's width",
        )
    index, weights = router_choice(description, call, at)
    try:
        check_experts(index, n)
    except UsageError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
    index, weights = (each.reshape(-1, each.shape[-1]) for each in (index, weights))

    def run(layer: nn.Module, rows: Tensor) -> Tensor:
        result: Tensor = layer(rows, index[: len(rows)], weights[: len(rows)])
        return result

    if call.y.shape[:-1] != call.x.shape[:-1]:
        raise ParityError(
            f"{at} gives {list(call.y.shape)} for {list(call.x.shape)}",
            hint="experts give a row for each token; what is done with them after belongs into a "
            "module around",
        )
    x, y = (each.reshape(-1, each.shape[-1]) for each in (call.x, call.y))
    _check_described(description, x, y, run, at, TRIED_TOKENS)


def check_same(
    own: ForwardPass, twin: nn.Module, places: Sequence[LayerPlace], source: str
) -> None:
    """Raises ParityError unless the twin gives what the user's network gave in a pass.

    It names the first layer that differs. `places` are those of the layers that were replaced.
    """
    ours = forward_pass(
        twin,
        places,
        own.inputs,
        f"{source}, its MoE layers replaced",
        hint="the network may take nothing of such a layer but what it returns: y = layer(x)",
    )
    called = [place for place in places if place.path in own.layers]
    for place in called:
        if place.path not in ours.layers:
            raise FamilyError(
                f"{source}: the network does not call what takes the place of {place.at}",
                hint="its forward may look for layers of that class, or be a function that holds "
                "the network itself: make it a method that calls the layer by its name",
            )
    wrong = [
        (place, miss)
        for place in called
        if (miss := _miss(own.layers[place.path].y, ours.layers[place.path].y)) is not None
    ]
    result = _miss(own.result, ours.result)
    if not wrong and result is None:
        return
    changing = [place.at for place in called if own.layers[place.path].in_place]
    if changing:
        raise ParityError(
            f"{source}: {changing[0]} changes its input in place, and the network then uses that",
            hint="x = x + … where the layer has x += … or x.add_(…)",
        )
    if not wrong:
        raise ParityError(
            f"{source}: every MoE layer agrees, but the result does not: {result}",
            hint="is the network in eval mode deterministic?",
        )
    place, miss = wrong[0]
    if place.adapter is not None:
        raise ParityError(
            f"{source}: {place.at} computes something else in the network than {place.title}: "
            f"{miss}",
            hint="does the network add hooks to it, or call it several times in different ways?",
        )
    raise ParityError(
        f"{source}: {place.at} computes something else than the published layer that its "
        f"parameters resemble: {miss}",
        hint="its forward differs (dispatch and combine swapped, another normalisation or "
        f"activation, …): {EXAMPLE.format(name=place.class_name)}",
    )


def _miss(expected: Tensor, actual: Tensor) -> str | None:
    """How two tensors differ; None where they agree within TOLERANCE of the larger's maximum."""
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    if difference(expected, actual) <= TOLERANCE:
        return None
    error, largest = float((expected - actual).abs().max()), float(expected.abs().max())
    return f"off by {error:.2e} where max|y| is {largest:.2e}"


def surroundings(path: str, call: LayerCall) -> Callable[[nn.Module], nn.Module] | None:
    """What must stand around our layer in place of the user's.

    A change of layout; a name; or a module whose `forward` calls our layer as one, where it is that
    which the network calls.
    """
    if call.x.ndim == 4:
        return PixelBackbone
    if call.x.ndim == call.y.ndim == 2:
        return VectorBackbone
    return TokenBackbone if call.direct or not path else None


def router_choice(
    description: ExpertsDescription, call: LayerCall, at: str
) -> tuple[Tensor, Tensor]:
    """What the router gives for what the layer was called with; a UsageError names the layer."""
    try:
        with torch.no_grad():
            # A router may change in place what it is given.
            return routing(description.router, (call.x.clone(), *call.further), call.named, None)
    except MoexportError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
    except Exception as error:  # the user's code may fail in any way
        raise UsageError(
            f"{at}: its router failed: {type(error).__name__}: {error}",
            hint="it is called with what the layer is called with; --verbose shows where it was "
            "raised",
        ) from error
