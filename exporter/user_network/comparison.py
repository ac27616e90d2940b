"""Whether our layers compute what a user's own do: alone, as described, and in the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf, isnan
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...errors import FamilyError, MoexportError, ParityError, UsageError
from ...graphs.layers.base import MoELayer
from .adapters import EXAMPLE, PAGE
from .calls import ForwardPass, LayerCall, copied_in_depth, forward_pass
from .descriptions import Description, ExpertsDescription, SoftMoEDescription
from .examples import differ, made_up
from .layers import LayerPlace
from .own_forward import InPlace, Tried, result_of

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
    call: LayerCall,
    layer: nn.Module,
    run: Callable[[Description, int | None], Tensor],
    at: str,
) -> None:
    """Raises ParityError unless what was described gives y, where the user's layer gave it, for x.

    `run` says what a description gives for the call, or the first inputs of it. `layer` is the
    user's, and `at` begins the message.
    """
    x, y = call.x, call.y
    with torch.no_grad():
        ours = run(description, None)
        if ours.shape != y.shape:
            raise ParityError(
                f"{at} gives {list(y.shape)} for {list(x.shape)}, and what its adapter says gives "
                f"{list(ours.shape)}",
                hint="are the experts' last weights those of another layer, or transposed?",
            )
        off = difference(y, ours)
        if off <= CLOSE:
            return
        _check_not_random(layer, call, at)
        tried = _tried(description, x, y, run, numbers_of(layer))
    if off <= TOLERANCE and not _closer(tried):
        return
    raise _mismatch(at, off, tried, description)


def _check_not_random(layer: nn.Module, call: LayerCall, at: str) -> None:
    """Raises ParityError where the user's layer gives something else for the same call."""
    args, named = copied_in_depth((call.args, dict(call.named)))
    try:
        again = result_of(layer(*args, **named))
    except Exception:  # noqa: BLE001  a layer may need its network to run
        return
    if again is not None and again.shape == call.y.shape and difference(call.y, again) > TOLERANCE:
        raise ParityError(
            f"{at} gives another result each time that it is called, in eval mode, too",
            hint="noise belongs into training alone: if self.training",
        )


def numbers_of(layer: nn.Module) -> dict[str, float]:
    """Returns a layer's numbers: attributes, and parameters and buffers of one number."""
    numbers: dict[str, float] = {}
    for name, value in vars(layer).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    for name, value in (*layer.named_parameters(), *layer.named_buffers()):
        if value.numel() == 1:
            numbers[name] = float(value)
            numbers[f"{name}.exp()"] = float(value.exp())
    return numbers


@dataclass(frozen=True, slots=True)
class _Trial:
    """Options that were changed, and how far off y then is, as it is and with x taken from it."""

    changed: dict[str, str]
    off: float
    off_without_x: float


def _tried(
    description: Description,
    x: Tensor,
    y: Tensor,
    run: Callable[[Description, int | None], Tensor],
    numbers: Mapping[str, float],
) -> list[_Trial]:
    """Every combination of the options, the fewest changes first."""
    trials = []
    for changed, variant in description.variants(numbers):
        try:
            ours = run(variant, TRIED_INPUTS)
        except (MoexportError, RuntimeError):
            if not changed:
                raise
            continue  # no reading of these weights
        own, tokens = y[: len(ours)], x[: len(ours)]
        off = difference(own, ours) if own.shape == ours.shape else inf
        added = own.shape == tokens.shape == ours.shape
        without_x = difference(own - tokens, ours) if added else inf
        trials.append(_Trial(changed=changed, off=off, off_without_x=without_x))
    return sorted(trials, key=lambda trial: len(trial.changed))


def _closer(tried: Sequence[_Trial]) -> list[_Trial]:
    """Those that match, and far better than the description as it is."""
    as_it_is = next(trial.off for trial in tried if not trial.changed)
    return [trial for trial in tried if trial.off <= min(TOLERANCE, as_it_is / 10)]


MOST_SHOWN = 6
"""Options of which it is said how far off each is."""


def _mismatch(
    at: str, off: float, tried: Sequence[_Trial], description: Description
) -> ParityError:
    """What to say of a layer that is not what its adapter says: which options match, or none."""
    begins = f"{at} does not match its adapter: off by {_share(off)} of max|y|"
    closer = _closer(tried)
    if closer:
        limit = max(10 * min(trial.off for trial in closer), CLOSE)
        fitting = [trial.changed for trial in closer if trial.off <= limit]
        fewest = [_said(change) for change in fitting if len(change) == len(fitting[0])]
        return ParityError(
            f"{begins}; it matches with {' or with '.join(fewest[:3])}",
            hint="moexport.SoftMoE has no such option: moexport.Experts with a forward computes it "
            f"({PAGE})"
            if any("softmax" in key for key in fitting[0])
            else "use these options in the adapter if they describe the layer",
        )
    added = min(tried, key=lambda trial: trial.off_without_x)
    if added.off_without_x <= TOLERANCE:
        fitting = [trial.changed for trial in tried if trial.off_without_x <= TOLERANCE]
        return ParityError(
            f"{begins}; it matches with {_said(fitting[0])} once x is taken from y: the layer "
            "adds its input",
            hint="residual=True in the adapter"
            if isinstance(description, SoftMoEDescription) and description.code is None
            else "add it in the adapter's forward: return x + experts(…)",
        )
    single: dict[str, _Trial] = {}
    for trial in sorted(tried, key=lambda trial: trial.off):
        keys = trial.changed.keys() - {"eps"} or trial.changed.keys()
        if len(keys) == 1:  # with the eps that goes with it best
            single.setdefault(next(iter(keys)), trial)
    shown = [*single.values()][:MOST_SHOWN]
    listed = ", ".join(f"{_said(change.changed)}: {_share(change.off)}" for change in shown)
    return ParityError(
        f"{begins}; none of {len(tried)} combinations of options matches ({listed})",
        hint=f"{description.advice} ({PAGE})",
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
    if place.own_code is not None:
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
        y = next((y for batch in batches if (y := _numbers(layer, batch)) is not None), None)
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
            y = result_of(layer(x.clone()))
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return None
    return y if y is not None and bool(y.isfinite().all()) else None


def check_adapter(place: LayerPlace, layer: nn.Module, one_pass: ForwardPass, source: str) -> None:
    """Raises ParityError unless what an adapter says gives y for x, as the user's `layer` did."""
    call = one_pass.layers.get(place.path)
    description = place.description
    if description is None or call is None:
        return
    at = f"{source}: {place.at}" + (", which changes its input in place," if call.in_place else "")
    if place.own_code is not None:
        _check_own_code(description, call, layer, at)
        return
    assert not isinstance(description, ExpertsDescription)
    spec = place.make("").spec
    pixels = layout_of(call) == "pixels"
    ranks = (2, 3, 4, 5) if spec.routes_tokens else (3, 4, 5)
    if call.x.ndim not in ranks or call.x.shape[1 if pixels else -1] != spec.dim:
        raise UsageError(
            f"{at} is called on {list(call.x.shape)}, and what its adapter says takes "
            f"tokens (b, m, {spec.dim}) or pixels (b, {spec.dim}, height, width)",
            hint="phi is [d, n, p], a gate [d, n]: d is the width of a token",
        )

    def run(described: Description, count: int | None) -> Tensor:
        if isinstance(described, ExpertsDescription):
            part = replace(call, args=(call.x[:count],))
            return result_of_code(described, part, at)[1]
        y = result_of(surroundings(described, call)(described.build(""))(call.x[:count]))
        assert y is not None
        return y

    _check_described(description, call, layer, run, at)


def _check_own_code(description: Description, call: LayerCall, layer: nn.Module, at: str) -> None:
    """Raises ParityError unless the user's code around our layer gives what the user's did."""

    def run(described: Description, count: int | None) -> Tensor:
        del count  # code may need the whole batch, and what goes with it
        return result_of_code(described, call, at)[1]

    _check_described(description, call, layer, run, at)


def result_of_code(
    description: Description, call: LayerCall, at: str
) -> tuple[MoELayer | None, Tensor, Tried | None]:
    """Returns our layer as the user's code calls for it, and what that returns for a call.

    UsageErrors name the layer. `Tried` is what a bank of experts was called with.
    """
    code = description.code
    assert code is not None
    tried = None
    layer: MoELayer | None = None
    if isinstance(description, ExpertsDescription):
        tried = Tried(description)
    else:
        layer = description.build("")
    counted = tried if tried is not None else _Counted(layer)
    try:
        with torch.no_grad():
            # Code may change in place what it is given.
            args, named = copied_in_depth((call.args, dict(call.named)))
            returned = code.run(counted, args, named)
    except MoexportError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
    except Exception as error:  # the user's code may fail in any way
        what = "router" if code.router is not None else "forward"
        taken = ", ".join(_words(call))
        raise UsageError(
            f"{at}: its {what} failed: {type(error).__name__}: {error}",
            hint=f"it is called with {'' if what == 'router' else 'our layer and '}what the layer "
            f"is called with ({taken}); --verbose shows where it was raised",
        ) from error
    y = result_of(returned)
    if y is None:
        raise UsageError(
            f"{at}: its forward returned a {type(returned).__name__}, and no tensor in it",
            hint="it returns what the layer does, or the layer's first tensor alone",
        )
    if counted.calls != 1:
        raise UsageError(
            f"{at}: its forward calls our layer {counted.calls or 'not'} times".replace(
                "not times", "not at all"
            ),
            hint="forward(experts, x) calls experts(…) once: what would be several calls is one, "
            "with further tokens or further experts",
        )
    return (tried.layer if tried is not None else layer), y, tried


class _Counted:
    """A layer that counts its calls."""

    def __init__(self, layer: nn.Module | None) -> None:
        self._layer, self.calls = layer, 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        assert self._layer is not None
        self.calls += 1
        return self._layer(*args, **named)


def _words(call: LayerCall) -> list[str]:
    """What a layer was called with, in a message."""
    listed = [*((None, value) for value in call.args), *call.named.items()]
    return [
        f"{f'{key}=' if key else ''}{list(x.shape) if isinstance(x, Tensor) else repr(x)}"
        for key, x in listed
    ]


def check_same(
    own: ForwardPass, twin: nn.Module, places: Sequence[LayerPlace], source: str
) -> None:
    """Raises ParityError unless the twin gives what the user's network gave in a pass.

    It names the first layer that differs. `places` are those of the layers that were replaced.
    """
    try:
        ours = forward_pass(
            twin,
            places,
            own.inputs,
            f"{source}, its MoE layers replaced",
            hint="the network may take nothing of such a layer but what it returns: y = layer(x)",
        )
    except UsageError as error:
        read = _read_of_a_layer(error.__cause__)
        if read is None:
            raise
        raise FamilyError(
            f"{source}: the network around reads .{read} of a layer, and what takes its place has "
            "none",
            hint="an adapter with a forward keeps the layer's attributes: "
            "moexport.SoftMoE(…, forward=lambda moe, x: moe(x))",
        ) from error
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


def _read_of_a_layer(error: BaseException | None) -> str | None:
    """The attribute that a network missed of one of ours; None for any other error."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, MoELayer | InPlace):
        return None
    return str(error.name)


def _miss(expected: Tensor, actual: Tensor) -> str | None:
    """How two tensors differ; None where they agree within TOLERANCE of the larger's maximum."""
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    if difference(expected, actual) <= TOLERANCE:
        return None
    error, largest = float((expected - actual).abs().max()), float(expected.abs().max())
    return f"off by {error:.2e} where max|y| is {largest:.2e}"


def layout_of(call: LayerCall) -> Literal["tokens", "pixels", "vectors"]:
    """How the tokens of a layer lie in what it is called with."""
    if call.x.ndim > 3:
        return "pixels"
    return "vectors" if call.x.ndim == call.y.ndim == 2 else "tokens"


def surroundings(description: Description | None, call: LayerCall) -> partial[InPlace]:
    """Returns what stands around our layer in place of the user's."""
    residual = isinstance(description, SoftMoEDescription) and description.residual
    return partial(InPlace, layout=layout_of(call), residual=residual, returned=call.structure)


def needs_surroundings(place: LayerPlace, call: LayerCall) -> bool:
    """Whether anything stands around our layer.

    A change of layout, of what is returned; a name; or a module whose `forward` calls our layer as
    one, where it is that which the network calls.
    """
    around = surroundings(place.description, call).keywords
    plain = around == {"layout": "tokens", "residual": False, "returned": None}
    return not plain or call.direct or not place.path
