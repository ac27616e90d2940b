"""Whether our layers compute what a user's own do: alone, as described, and in the network."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...common.threads import fastest_threads, with_threads
from ...common.user_code import user_code
from ...errors import FamilyError, MoexportError, ParityError, UsageError
from ...graphs.layers.base import MoELayer
from ..token_routed.own_forward import InPlace, Tried, result_of
from .adapters import EXAMPLE
from .calls import ForwardPass, LayerCall, copied_in_depth, forward_pass
from .descriptions import (
    Description,
    ExpertsDescription,
    MuMoEDescription,
    SoftMoEDescription,
    held_by,
)
from .examples import differ, made_up
from .layers import LayerPlace
from .mismatch import CLOSE, TOLERANCE, DescribedRun, difference, mismatch


def _check_described(
    description: Description, call: LayerCall, layer: nn.Module, run: DescribedRun, at: str
) -> None:
    """Raises ParityError unless what was described gives y, where the user's layer gave it, for x.

    `run` says what a description gives for a call. `layer` is the user's, and `at` begins the
    message.
    """
    x, y = call.x, call.y
    with torch.no_grad():
        ours = run(description, call)
        if ours.shape != y.shape:
            raise ParityError(
                f"{at} gives {list(y.shape)} for {list(x.shape)}, and what its adapter says gives "
                f"{list(ours.shape)}",
                hint="are the experts' last weights those of another layer, or transposed?",
            )
        if difference(y, ours) <= CLOSE:
            return
        made = _made_within(layer, call, description, at)
        with with_threads(fastest_threads(lambda: run(description, call)).count):
            problem = mismatch(description, call, run, held_by(layer), made, at)
    if problem is not None:
        raise problem


def _made_within(
    layer: nn.Module, call: LayerCall, description: Description, at: str
) -> dict[str, Tensor]:
    """What the parts of a layer make that has the shape of y, by their names; not its experts.

    Raises ParityError where the layer gives something else for the same call.
    """
    experts = set() if isinstance(description, MuMoEDescription) else description.pointers()
    made: dict[str, Tensor] = {}

    def keep(name: str, returned: object) -> None:
        if isinstance(returned, Tensor) and returned.shape == call.y.shape:
            made[name] = returned.detach().clone()

    parts = [
        (name, part)
        for name, part in layer.named_modules()
        if name and (held := [*part.parameters()]) and not experts & {p.data_ptr() for p in held}
    ]
    args, named = copied_in_depth((call.args, dict(call.named)))
    with ExitStack() as watching:
        for name, part in parts:
            hook = part.register_forward_hook(lambda _, __, y, name=name: keep(name, y))
            watching.callback(hook.remove)
        try:
            again = result_of(layer(*args, **named))
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return {}
    if again is not None and again.shape == call.y.shape and difference(call.y, again) > TOLERANCE:
        raise ParityError(
            f"{at} gives another result each time that it is called, in eval mode, too",
            hint="noise belongs into training alone: if self.training",
        )
    return {name: made[name] for name, _ in parts if name in made}  # what holds others before them


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

    def run(described: Description, call: LayerCall) -> Tensor:
        if isinstance(described, ExpertsDescription):
            return result_of_code(described, call, at)[1]
        y = result_of(surroundings(described, call)(described.build(""))(call.x))
        assert y is not None
        return y

    _check_described(description, call, layer, run, at)


def _check_own_code(description: Description, call: LayerCall, layer: nn.Module, at: str) -> None:
    """Raises ParityError unless the user's code around our layer gives what the user's did."""

    def run(described: Description, call: LayerCall) -> Tensor:
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
    what = "router" if code.router is not None else "forward"
    hint = (
        f"it is called with {'' if what == 'router' else 'our layer and '}what the layer is called "
        f"with ({', '.join(_words(call))}); --verbose shows where it was raised"
    )
    try:
        with torch.no_grad(), user_code(f"its {what} failed", hint):
            # Code may change in place what it is given.
            args, named = copied_in_depth((call.args, dict(call.named)))
            returned = code.run(counted, args, named)
    except MoexportError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
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
    misses = ((n, _miss(y, ours.outputs[n])) for n, y in own.outputs.items())
    result = next((f"{name} is {miss}" for name, miss in misses if miss is not None), None)
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
    expected, actual = expected.double(), actual.double()  # what is whole may wrap around
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
