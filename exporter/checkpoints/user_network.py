"""MoE layers found in a user's own network by the names and shapes of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...common.user_code import attribute_of, module_of
from ...errors import CheckpointError, FamilyError, MoexportError, ParityError, UsageError
from ...graphs.layers.base import MoELayer, moe_layers, sharing_weights
from ..families import FAMILIES, LAYOUTS, LayerLayout
from ..families.base import Tensors, find_layers
from ..families.layer_only import PixelBackbone, TokenBackbone
from ..model import Model, Source, TensorSpec
from .state_dict import Checkpoint, read_checkpoint

TOLERANCE = 1e-4
"""Largest difference from the user's own forward, as a fraction of max|y|, in float32."""


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A module whose parameters are those of a published layer: where it is, and of which kind.

    `aliases` are further names under which the network holds the same module.
    """

    path: str
    layer: LayerLayout
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """A layer of moexport's own classes in a user's network: it is taken as it is."""

    module: MoELayer
    mark: str = ""

    @property
    def family(self) -> str:
        """What it is called in notes."""
        return self.module.spec.kind

    @property
    def title(self) -> str:
        """The class."""
        return type(self.module).__name__

    @property
    def match(self) -> Callable[[Tensors], bool]:
        """Parameters do not tell it: its class does."""
        return lambda _: False

    def make(self, name: str, prefix: str, tensors: Tensors) -> MoELayer:
        """Returns the layer with the weights it has, under the name of its place."""
        del prefix, tensors
        layer = sharing_weights(self.module)
        assert isinstance(layer, MoELayer)
        # Specs are dataclasses, which their protocol does not say.
        layer.spec = replace(self.module.spec, name=name)  # type: ignore[type-var]
        return layer


@dataclass(frozen=True, slots=True)
class Passage:
    """What one forward pass showed: each found layer's input rank and output, and the result."""

    order: tuple[str, ...]
    ranks: Mapping[str, int]
    outputs: Mapping[str, Tensor]
    result: Tensor


def find_in_module(module: nn.Module) -> tuple[FoundLayer, ...]:
    """Returns the MoE layers that a network holds; raises FamilyError when it holds none."""
    tensors = module.state_dict()
    paths: dict[int, list[str]] = {}
    for path, sub in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(sub), []).append(path)
    layouts: dict[str, LayerLayout] = {
        prefix.removesuffix("."): layer
        for layer in LAYOUTS
        for prefix in find_layers(tensors, layer)
    }
    layouts |= {path: OwnLayer(layer) for path, layer in moe_layers(module).items()}
    found = [
        FoundLayer(first, layouts[first], tuple(others))
        for first, *others in paths.values()
        if first in layouts
    ]
    if not found:
        names = ", ".join(list(tensors)[:6])
        raise FamilyError(
            f"{type(module).__name__} holds no Soft MoE layer and no muMoE layer that moexport "
            f"knows (its parameters: {names}, …)",
            hint=f"known layers: {', '.join(FAMILIES)}; the layer must be a module of its own",
        )
    return tuple(found)


def pass_through(
    module: nn.Module, found: tuple[FoundLayer, ...], inputs: Tensor, what: str
) -> Passage:
    """Runs the network once on `inputs` and returns what its MoE layers did.

    Raises FamilyError when a layer is called with more than its tokens, or never, or when the
    result is not one tensor.
    """
    order: list[str] = []
    ranks: dict[str, int] = {}
    outputs: dict[str, Tensor] = {}

    def record(
        path: str, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object
    ) -> None:
        tokens = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(tokens, Tensor) or not isinstance(out, Tensor):
            raise FamilyError(
                f"{what}: {path or 'the layer'} is called with more than its tokens, or "
                "returns more than a tensor",
                hint="its forward must be y = layer(x) at inference",
            )
        order.append(path)
        ranks[path] = tokens.ndim
        outputs[path] = out.detach()

    with ExitStack() as hooks, torch.no_grad():
        for path in (layer.path for layer in found):
            sub = module.get_submodule(path)
            hooks.enter_context(sub.register_forward_hook(partial(record, path), with_kwargs=True))
        try:
            result = module(inputs)
        except MoexportError:
            raise
        except Exception as error:  # the user's code may fail in any way
            raise UsageError(
                f"{what}: its forward failed on an input of shape {list(inputs.shape)}: "
                f"{type(error).__name__}: {error}",
                hint="does the example, or --set input_shape=…, fit the network?",
            ) from error
    unused = [layer.path for layer in found if layer.path not in ranks]
    if unused:
        raise FamilyError(
            f"{what}: the layer {unused[0] or '(the network itself)'} was not called as a module "
            f"on an input of shape {list(inputs.shape)}"
        )
    if not isinstance(result, Tensor):
        raise FamilyError(
            f"{what}: its forward returned a {type(result).__name__}, not one tensor",
            hint="give a factory whose forward returns the logits alone",
        )
    return Passage(tuple(order), ranks, outputs, result)


def swapped(
    module: nn.Module, found: tuple[FoundLayer, ...], ranks: Mapping[str, int]
) -> tuple[nn.Module, tuple[str, ...], tuple[str, ...]]:
    """Returns a copy of the network with ours for its MoE layers, their paths, and notes.

    All tensors are shared with `module`. `ranks` tells which layers work on pixels (b, d, H, W).
    Raises FamilyError for a layer with parameters that the published code does not have.
    """
    tensors = module.state_dict()
    try:
        twin = sharing_weights(module)
    except (TypeError, RuntimeError) as error:
        raise FamilyError(
            f"{type(module).__name__} cannot be copied, so its layers cannot be replaced: {error}",
            hint="keep what cannot be copied (locks, files, results) out of its attributes",
        ) from error
    names, notes = [], []
    for place in found:
        prefix = place.path + "." if place.path else ""
        backbone = _backbone(place.path, ranks[place.path])
        name = f"{place.path}.layer".removeprefix(".") if backbone else place.path
        try:
            layer: nn.Module = place.layer.make(name, prefix, tensors)
        except CheckpointError as error:
            raise FamilyError(
                f"{place.path or 'the network'} resembles a {place.layer.family} layer: "
                f"{error.message}",
                hint="only layers whose parameters are those of a published code are known",
            ) from error
        layer = backbone(layer) if backbone else layer
        for path in (place.path, *place.aliases):
            twin = _with_submodule(twin, path, layer.eval())
        names.append(name)
        notes.append(f"{place.path or 'the network'} replaced as a {place.layer.family} layer")
    return twin, tuple(names), tuple(notes)


def _backbone(path: str, rank: int) -> type[PixelBackbone] | type[TokenBackbone] | None:
    """What must stand around our layer in place of the user's: a change of layout, or a name."""
    if rank == 4:
        return PixelBackbone
    return None if path else TokenBackbone


def _with_submodule(module: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    if not path:
        return replacement
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, replacement)
    return module


def check_same(own: Passage, ours: Passage, what: str) -> None:
    """Raises ParityError unless both passes gave the same, naming the first layer that differs."""
    for path in own.order:
        miss = _miss(own.outputs[path], ours.outputs[path])
        if miss is not None:
            raise ParityError(
                f"{what}: the layer {path or '(the network itself)'} computes something else than "
                f"the published layer that its parameters resemble: {miss}",
                hint="its forward differs (dispatch and combine swapped, another normalisation or "
                "activation, …), and such a layer is not supported",
            )
    miss = _miss(own.result, ours.result)
    if miss is not None:
        raise ParityError(
            f"{what}: every MoE layer agrees, but the result does not: {miss}",
            hint="is the network in eval mode deterministic?",
        )


def _miss(expected: Tensor, actual: Tensor) -> str | None:
    """How two tensors differ; None where they agree within TOLERANCE of the larger's maximum."""
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    largest = float(expected.abs().max())
    error = float((expected - actual).abs().max())
    if error <= TOLERANCE * largest:  # false for NaN, too
        return None
    return f"off by {error:.2e} where max|y| is {largest:.2e}"


INPUT_SHAPE = "input_shape"

EXAMPLE = "example_input"

EXAMPLE_BATCH = 2


def load_factory(
    source: str, config: Mapping[str, Any], weights: Path | None, example: np.ndarray | None
) -> Model:
    """Returns the network that a factory builds, its Soft MoE layers replaced by ours.

    `config` are the factory's arguments, and `input_shape` without the batch where the network has
    no `example_input` and no `example` [b, …] is given. Both networks run on that input; a
    difference is a ParityError. The user's own module is kept as `Model.original`.
    """
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    module = _built(source, _find(source), arguments)
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    mapped: tuple[Path, ...] = ()
    if weights is not None:
        checkpoint = read_checkpoint(weights)
        notes += checkpoint.notes
        _fill(module, checkpoint, source)
        files, mapped = checkpoint.files, checkpoint.mapped
    else:
        notes += (f"no --weights: the weights are those that {source} gave the network",)
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters()):
        notes += ("converted the network to float32",)
    module = module.float().eval().requires_grad_(False)
    inputs, note = _example(source, module, config.get(INPUT_SHAPE), example)
    found = find_in_module(module)
    own = pass_through(module, found, inputs, source)
    # In the order in which they are called.
    found = tuple(sorted(found, key=lambda layer: own.order.index(layer.path)))
    twin, layers, replaced = swapped(module, found, own.ranks)
    ours = pass_through(twin, found, inputs, source)
    check_same(own, ours, source)
    array = inputs.numpy()
    result = own.result.numpy()
    return Model(
        module=twin,
        family="factory",
        config=dict(config),
        source=Source(source, files, None if weights is None else str(weights), mapped),
        input=TensorSpec("input", array.dtype.name, ("batch", *array.shape[1:])),
        output=TensorSpec("output", result.dtype.name, ("batch", *result.shape[1:])),
        notes=(*notes, *note, *replaced),
        original=module,
        example=array,
        order=layers,
    )


def _find(source: str) -> Callable[..., object]:
    """The callable that `package.module:factory` names; the current directory is importable."""
    name, _, attribute = source.partition(":")
    try:
        module = module_of(source)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{source}: no module named {error.name}",
                hint="run from the folder that holds it, or install its package",
            ) from error
        raise UsageError(
            f"{source}: importing {name} failed: {error}", hint="install what it needs"
        ) from error
    except Exception as error:  # the user's code may fail in any way
        raise UsageError(
            f"{source}: importing {name} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        found = attribute_of(module, source)
    except AttributeError as error:
        raise UsageError(f"{source}: {name} has no {attribute}") from error
    if not callable(found):
        raise UsageError(f"{source}: {attribute} is a {type(found).__name__}, not callable")
    factory: Callable[..., object] = found
    return factory


def _built(source: str, factory: Callable[..., object], arguments: dict[str, Any]) -> nn.Module:
    try:
        module = factory(**arguments)
    except Exception as error:  # the user's code may fail in any way
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UsageError(
            f"{source}({listed}) failed: {type(error).__name__}: {error}",
            hint="--config and --set are passed to the factory as its arguments",
        ) from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{source} returned a {type(module).__name__}, not a torch.nn.Module")
    return module


def _fill(module: nn.Module, checkpoint: Checkpoint, source: str) -> None:
    """Gives the network its weights without a copy; raises CheckpointError for other keys."""
    expected = module.state_dict()
    tensors = _named_as(expected, checkpoint)
    missing = [key for key in expected if key not in tensors]
    extra = [key for key in tensors if key not in expected]
    wrong = [
        f"{key} has shape {list(t.shape)}, expected {list(expected[key].shape)}"
        for key, t in tensors.items()
        if key in expected and t.shape != expected[key].shape
    ]
    if missing or extra or wrong:
        problems = [f"missing {', '.join(missing[:6])}"] if missing else []
        problems += [f"unexpected {', '.join(extra[:6])}"] if extra else []
        raise CheckpointError(
            f"{checkpoint.files[0]}: not the weights of {source}: "
            f"{'; '.join(problems + wrong[:6])}",
            hint="do the factory's arguments (--set) match the checkpoint?",
        )
    module.load_state_dict(tensors, assign=True)


def _named_as(expected: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors with as many of the removed prefixes put back as the network's own keys have."""
    for start in range(len(checkpoint.prefixes) + 1):
        prefix = "".join(checkpoint.prefixes[start:])
        if all(key.startswith(prefix) for key in expected):
            return {prefix + key: tensor for key, tensor in checkpoint.tensors.items()}
    return checkpoint.tensors


def _example(
    source: str, module: nn.Module, shape: object, given: np.ndarray | None
) -> tuple[Tensor, tuple[str, ...]]:
    """The input [b, …] on which both networks run, and a note where it is random."""
    if given is not None:
        array = given.astype(np.float32) if given.dtype.kind == "f" else given
        return torch.from_numpy(np.ascontiguousarray(array)), ()
    own = getattr(module, EXAMPLE, None)
    if own is not None:
        value = own() if callable(own) else own
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor):
            raise UsageError(
                f"{source}: {EXAMPLE} is a {type(value).__name__}, not a tensor or an array"
            )
        return value.detach(), ()
    sizes = [shape] if isinstance(shape, int) else shape
    if not isinstance(sizes, list | tuple) or not all(isinstance(s, int) and s > 0 for s in sizes):
        given_text = "" if shape is None else f" ({INPUT_SHAPE}={shape!r} is no list of sizes)"
        raise UsageError(
            f"{source}: no input to check the replaced layers with{given_text}",
            hint=f"--set {INPUT_SHAPE}=3,224,224 (without the batch), --data with real inputs, or "
            f"an attribute {EXAMPLE} on the network",
        )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLE_BATCH, *sizes, generator=generator)
    return inputs, (f"the replaced layers were checked on random inputs of shape {list(sizes)}",)
