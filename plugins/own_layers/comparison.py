"""Compares single inputs with batches, layers with their descriptions, and whole networks."""

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
from .layers import FoundLayer
from .mismatch import CLOSE, TOLERANCE, difference, mismatch


def _part_outputs(layer: nn.Module, call: LayerCall, description: Description) -> dict[str, Tensor]:
    """Returns the outputs of a layer's parts, except experts, that have y's shape, by name."""
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
    args, named = call.copy_args()
    with ExitStack() as hooks:
        for name, part in parts:
            hook = part.register_forward_hook(lambda _, __, y, name=name: record(name, y))
            hooks.callback(hook.remove)
        try:
            layer(*args, **named)
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return {}
    return {name: outputs[name] for name, _ in parts if name in outputs}  # outer modules first


def random_result_error(at: str, because: str = "") -> ParityError:
    """Returns the error for a layer whose results differ between equal calls."""
    return ParityError(
        f"{at} returns a different result each time it is called, even in eval mode{because}",
        hint="add noise and change buffers in training only: if self.training",
    )


SINGLE_INPUTS = 4


def check_batch_independence(
    found: FoundLayer, layer: nn.Module, call: LayerCall, source: str
) -> None:
    """Raises ParityError if a layer's result for an input depends on the rest of the batch.

    Our layers' results never do. User code around a layer is part of the graph and compared there.
    """
    if found.own_code is not None:
        return
    x = call.x if differ(call.x) else torch.cat([call.x, *islice(random_like(call.x), 1)])
    together = _finite_result(layer, x)
    if together is None or together.shape[:1] != x.shape[:1]:
        return
    rows = sorted({*torch.linspace(0, len(x) - 1, SINGLE_INPUTS).long().tolist()})
    alone = []
    for row in rows:
        # Two inputs, for a layer that does not accept a batch of one.
        batches = (x[[row]], x[[row, row]])
        y = next((y for batch in batches if (y := _finite_result(layer, batch)) is not None), None)
        if y is None or y[:1].numel() != together[:1].numel():
            return
        alone.append(y[:1].reshape(together[:1].shape))
    off = difference(together[rows], torch.cat(alone))
    if off <= TOLERANCE:
        return
    raise ParityError(
        f"{source}: {found.label} mixes the inputs of its batch: an input's result in a batch "
        f"and its result alone differ by {off:.2g} × max|y|",
        hint="softmax, sums, statistics and reshapes in the layer must not include the first axis",
    )


def _finite_result(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Returns the layer's result for x outside its network; None if that is not finite."""
    with torch.no_grad():
        try:
            y = result_of(layer(x.clone()))
        except Exception:  # noqa: BLE001  a layer may need its network to run
            return None
    return y if y is not None and bool(y.isfinite().all()) else None


def check_adapter(found: FoundLayer, layer: nn.Module, network: ForwardPass, source: str) -> None:
    """Raises ParityError unless an adapter's description returns the same y as `layer` did."""
    call = network.layers.get(found.path)
    description = found.description
    if description is None or call is None:
        return
    x, y = call.x, call.y
    at = f"{source}: {found.label}" + ", which changes its input in place," * call.in_place
    if description.code is None:
        spec = found.make("").spec
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
    """Returns what a description computes for a call of the user's layer."""
    if description.code is not None:
        return result_of_code(description, call, at)[0]
    y = result_of(wrapper_for(description, call)(description.build(""))(call.x))
    assert y is not None
    return y


def result_of_code(
    description: Description, call: LayerCall, at: str
) -> tuple[Tensor, Tried | None]:
    """Returns the result of the user's code around our layer for a call.

    For a bank of experts, it also returns the call of the bank. UsageErrors name the layer.
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
        f"({', '.join(call.describe_args())}); --verbose shows where the error was raised"
    )
    try:
        with torch.no_grad(), user_code(f"its {what} failed", hint):
            returned = code.run(counted, *call.copy_args())
    except MoexportError as error:
        raise UsageError(f"{at}: {error.message}", hint=error.hint) from error
    y = result_of(returned)
    if y is None:
        raise UsageError(
            f"{at}: its forward returned a {type(returned).__name__} without a tensor",
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
    own: ForwardPass, converted: nn.Module, found_layers: Sequence[FoundLayer], source: str
) -> None:
    """Raises ParityError unless the network with our layers returns what the user's returned.

    The error names the first layer that differs. `found_layers` are the replaced layers.
    """
    try:
        ours = forward_pass(
            converted,
            found_layers,
            own.inputs,
            f"{source} with its MoE layers replaced",
            hint="the network may use only the outputs of its MoE layers: y = layer(x)",
        )
    except UsageError as error:
        cause = error.__cause__
        if not isinstance(cause, AttributeError) or not isinstance(cause.obj, MoELayer | InPlace):
            raise
        raise FamilyError(
            f"{source}: the network reads the attribute {cause.name} of a layer, but the exported "
            "layer does not have it",
            hint="an adapter with a forward keeps the layer's attributes: "
            "moexport.SoftMoE(…, forward=lambda moe, x: moe(x))",
        ) from error
    called = [found for found in found_layers if found.path in own.layers]
    for found in called:
        if found.path not in ours.layers:
            raise FamilyError(
                f"{source}: the network does not call the replacement of {found.label}",
                hint="the network's forward may look for layers of that class, or be a closure "
                "over the network: make forward a method that calls an attribute like self.moe(x)",
            )
    wrong = [
        (found, deviation)
        for found in called
        if (deviation := _deviation(own.layers[found.path].y, ours.layers[found.path].y))
        is not None
    ]
    outputs = ((n, _deviation(y, ours.outputs[n])) for n, y in own.outputs.items())
    result = next((f"{name} is {off}" for name, off in outputs if off is not None), None)
    if not wrong and result is None:
        return
    changing = [found.label for found in called if own.layers[found.path].in_place]
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
    found, deviation = wrong[0]
    if found.adapter is not None:
        raise ParityError(
            f"{source}: {found.label} computes something different in the network than "
            f"{found.title}: {deviation}",
            hint="check whether the network adds hooks to it or calls it in different ways",
        )
    raise ParityError(
        f"{source}: {found.label} computes something different from the published layer that its "
        f"parameters resemble: {deviation}",
        hint="its forward differs (dispatch and combine swapped, another normalisation or "
        f"activation, …): {EXAMPLE.format(name=found.class_name)}",
    )


def _deviation(expected: Tensor, actual: Tensor) -> str | None:
    """Returns how two tensors differ; None if they agree within TOLERANCE of max|expected|."""
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


def wrapper_for(description: Description | None, call: LayerCall) -> partial[InPlace]:
    """Returns the wrapper in which our layer replaces the user's."""
    residual = isinstance(description, SoftMoEDescription) and description.residual
    return partial(InPlace, layout=layout_of(call), residual=residual, returned=call.structure)


def needs_wrapper(found: FoundLayer, call: LayerCall) -> bool:
    """Whether our layer needs a wrapper.

    It does for another layout or returned structure, for a residual, if the network calls the
    layer's `forward` directly, and if the layer is the network itself.
    """
    wrapper = wrapper_for(found.description, call).keywords
    plain = wrapper == {"layout": "tokens", "residual": False, "returned": None}
    return not plain or call.direct or not found.path
