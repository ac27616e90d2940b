"""Compares the exported layers with the user's: alone, as described, and in the network."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...common.threads import fastest_threads, with_threads
from ...data.user_code import user_code
from ...errors import FamilyError, MoexportError, ParityError, UsageError
from ...graphs.layers.base import MoELayer
from ..token_routed.own_forward import InPlace, Tried, result_of
from .adapters import EXAMPLE
from .calls import ForwardPass, LayerCall, forward_pass
from .descriptions import (
    Description,
    ExpertsDescription,
    MuMoEDescription,
    SoftMoEDescription,
    contents_of,
)
from .examples import differ, random_like
from .layers import LayerPlace
from .mismatch import CLOSE, TOLERANCE, difference, mismatch


def _part_outputs(layer: nn.Module, call: LayerCall, description: Description) -> dict[str, Tensor]:
    """The outputs of the layer's parts that have the shape of y, by name, without the experts."""
    experts = set[int]()
    if not isinstance(description, MuMoEDescription):
        experts = {tensor.data_ptr() for tensor in description.tensors()}
    outputs: dict[str, Tensor] = {}

    def record(name: str, returned: object) -> None:
        if isinstance(returned, Tensor) and returned.shape == call.y.shape:
            outputs[name] = returned.detach().clone()

    parts = [
        (name, part)
        for name, part in layer.named_modules()
        if name and (own := [*part.parameters()]) and not experts & {p.data_ptr() for p in own}
    ]
    args, named = call.copied()
    with ExitStack() as hooks:
        for name, part in parts:
            hook = part.register_forward_hook(lambda _, __, y, name=name: record(name, y))
            hooks.callback(hook.remove)
        try:
            layer(*args, **named)
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return {}
    return {name: outputs[name] for name, _ in parts if name in outputs}  # outer modules first


def random_result(at: str, because: str = "") -> ParityError:
    """Returns the error for a layer with another result for the same call."""
    return ParityError(
        f"{at} gives a different result each time it is called, even in eval mode{because}",
        hint="add noise and change buffers in training only: if self.training",
    )


TRIED_ALONE = 4


def check_alone(place: LayerPlace, layer: nn.Module, call: LayerCall, source: str) -> None:
    """Raises ParityError if a layer's result for an input depends on the others of its batch.

    The exported layer's results never do. A user's router is part of the graph and compared there.
    """
    if place.own_code is not None:
        return
    x = call.x if differ(call.x) else torch.cat([call.x, *islice(random_like(call.x), 1)])
    together = _numbers(layer, x)
    if together is None or together.shape[:1] != x.shape[:1]:
        return
    rows = sorted({*torch.linspace(0, len(x) - 1, TRIED_ALONE).long().tolist()})
    alone = []
    for row in rows:
        # Two inputs, for a layer that does not accept a batch of one.
        batches = (x[[row]], x[[row, row]])
        y = next((y for batch in batches if (y := _numbers(layer, batch)) is not None), None)
        if y is None or y[:1].numel() != together[:1].numel():
            return
        alone.append(y[:1].reshape(together[:1].shape))
    off = difference(together[rows], torch.cat(alone))
    if off <= TOLERANCE:
        return
    raise ParityError(
        f"{source}: {place.at} mixes the inputs of its batch: the result for one is off by "
        f"{off:.2g} of max|y| from the result for it alone",
        hint="softmax, sums, statistics and reshapes of the layer must not include its first axis",
    )


def _numbers(layer: nn.Module, x: Tensor) -> Tensor | None:
    """The layer's result for x outside of its network; None if it has no finite result there."""
    with torch.no_grad():
        try:
            y = result_of(layer(x.clone()))
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return None
    return y if y is not None and bool(y.isfinite().all()) else None


def check_adapter(place: LayerPlace, layer: nn.Module, network: ForwardPass, source: str) -> None:
    """Raises ParityError unless an adapter's description returns y for x, as `layer` did."""
    call = network.layers.get(place.path)
    description = place.description
    if description is None or call is None:
        return
    x, y = call.x, call.y
    at = f"{source}: {place.at}" + (", which changes its input in place," if call.in_place else "")
    if description.code is None:
        spec = place.make("").spec
        pixels = layout_of(call) == "pixels"
        ranks = (2, 3, 4, 5) if spec.routes_tokens else (3, 4, 5)
        if x.ndim not in ranks or x.shape[1 if pixels else -1] != spec.dim:
            raise UsageError(
                f"{at} is called on {list(x.shape)}, but its adapter's description expects tokens "
                f"(b, m, {spec.dim}) or pixels (b, {spec.dim}, height, width)",
                hint="phi is [d, n, p], a gate [d, n]: d is the width of a token",
            )

    run = partial(result_of_description, at=at)
    with torch.no_grad():
        ours = run(description, call)
        if ours.shape != y.shape:
            raise ParityError(
                f"{at} returns {list(y.shape)} for {list(x.shape)}, but its adapter's description "
                f"returns {list(ours.shape)}",
                hint="check whether the experts' last weights belong to another layer or are "
                "transposed",
            )
        if difference(y, ours) <= CLOSE:
            return
        outputs = _part_outputs(layer, call, description)
        with with_threads(fastest_threads(lambda: run(description, call)).count):
            problem = mismatch(description, call, run, contents_of(layer), outputs, at)
    if problem is not None:
        raise problem


def result_of_description(description: Description, call: LayerCall, at: str) -> Tensor:
    """Returns the result of a described layer for a call of the user's."""
    if description.code is not None:
        return result_of_code(description, call, at)[0]
    y = result_of(surroundings(description, call)(description.build(""))(call.x))
    assert y is not None
    return y


def result_of_code(
    description: Description, call: LayerCall, at: str
) -> tuple[Tensor, Tried | None]:
    """Returns the result of the user's code around our layer for a call.

    UsageErrors name the layer. `Tried` records the arguments of a bank of experts.
    """
    code = description.code
    assert code is not None
    tried = Tried(description) if isinstance(description, ExpertsDescription) else None
    bank: Any = tried or description.build("")
    calls = 0

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return bank(*args, **named)

    what = "router" if code.router is not None else "forward"
    hint = (
        f"it gets {'' if what == 'router' else 'our layer and '}the layer's arguments "
        f"({', '.join(call.described())}); --verbose shows where it was raised"
    )
    try:
        with torch.no_grad(), user_code(f"its {what} failed", hint):
            returned = code.run(counted, *call.copied())
    except MoexportError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
    y = result_of(returned)
    if y is None:
        raise UsageError(
            f"{at}: its forward returned a {type(returned).__name__} without a tensor in it",
            hint="it must return the layer's result, or only its first tensor",
        )
    if calls != 1:
        times = f"{calls} times" if calls else "not at all"
        raise UsageError(
            f"{at}: its forward calls our layer {times}",
            hint="forward(experts, x) calls experts(…) once: join several calls into one with "
            "more tokens or more experts",
        )
    return y, tried


def check_same(
    own: ForwardPass, twin: nn.Module, places: Sequence[LayerPlace], source: str
) -> None:
    """Raises ParityError unless the twin returns what the user's network returned in a pass.

    It names the first layer that differs. `places` are the replaced layers.
    """
    try:
        ours = forward_pass(
            twin,
            places,
            own.inputs,
            f"{source}, its MoE layers replaced",
            hint="the network may only use the layer's output: y = layer(x)",
        )
    except UsageError as error:
        cause = error.__cause__
        if not isinstance(cause, AttributeError) or not isinstance(cause.obj, MoELayer | InPlace):
            raise
        raise FamilyError(
            f"{source}: the network reads the attribute {cause.name} of a layer, but the exported "
            "layer has none",
            hint="an adapter with a forward keeps the layer's attributes: "
            "moexport.SoftMoE(…, forward=lambda moe, x: moe(x))",
        ) from error
    called = [place for place in places if place.path in own.layers]
    for place in called:
        if place.path not in ours.layers:
            raise FamilyError(
                f"{source}: the network does not call the replacement of {place.at}",
                hint="its forward may look for layers of that class, or be a closure over the "
                "network: make it a method that calls the layer by its name",
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
            f"{source}: {changing[0]} changes its input in place, and the network then uses it",
            hint="in the layer, write x = x + … instead of x += … or x.add_(…)",
        )
    if not wrong:
        raise ParityError(
            f"{source}: every MoE layer matches, but the network's result does not: {result}",
            hint="check that the network is deterministic in eval mode",
        )
    place, miss = wrong[0]
    if place.adapter is not None:
        raise ParityError(
            f"{source}: {place.at} computes something different in the network than {place.title}: "
            f"{miss}",
            hint="check whether the network adds hooks to it or calls it in different ways",
        )
    raise ParityError(
        f"{source}: {place.at} computes something different from the published layer that its "
        f"parameters resemble: {miss}",
        hint="its forward differs (dispatch and combine swapped, another normalisation or "
        f"activation, …): {EXAMPLE.format(name=place.class_name)}",
    )


def _miss(expected: Tensor, actual: Tensor) -> str | None:
    """How two tensors differ; None if they agree within TOLERANCE of the larger's maximum."""
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    expected, actual = expected.double(), actual.double()  # integers may overflow
    if difference(expected, actual) <= TOLERANCE:
        return None
    error, largest = float((expected - actual).abs().max()), float(expected.abs().max())
    return f"off by {error:.2e} (max|y| is {largest:.2e})"


def layout_of(call: LayerCall) -> Literal["tokens", "pixels", "vectors"]:
    if call.x.ndim > 3:
        return "pixels"
    return "vectors" if call.x.ndim == call.y.ndim == 2 else "tokens"


def surroundings(description: Description | None, call: LayerCall) -> partial[InPlace]:
    """Returns the wrapper around our layer that replaces the user's."""
    residual = isinstance(description, SoftMoEDescription) and description.residual
    return partial(InPlace, layout=layout_of(call), residual=residual, returned=call.structure)


def needs_surroundings(place: LayerPlace, call: LayerCall) -> bool:
    """Whether anything is wrapped around our layer.

    That is a change of layout or of the returned structure, a name, or a module whose `forward`
    calls our layer, if the network calls that module.
    """
    around = surroundings(place.description, call).keywords
    plain = around == {"layout": "tokens", "residual": False, "returned": None}
    return not plain or call.direct or not place.path
