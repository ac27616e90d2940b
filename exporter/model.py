"""A loaded model: a PyTorch module with MoE layers, and what is known about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..common.files import Reading, Watched, hash_files
from ..data.batches import Inputs
from ..data.user_code import names_code
from ..errors import MoexportError, UsageError
from ..graphs.edits import (
    NO_EDITS,
    AblatedCombination,
    Ablation,
    Edits,
    KeptExperts,
    MergedExperts,
    Rewrite,
    Steer,
)
from ..graphs.layers.base import MoELayer, MoESpec, kind_text, moe_layers, sharing_weights
from ..graphs.layers.soft_moe import SoftMoESpec
from ..graphs.names import STEER_INPUT
from .bundle.manifest import TensorSpec as TensorSpec  # noqa: PLC0414

if TYPE_CHECKING:
    import onnx_ir as ir


class Host:
    """What a loader knows about its models beyond their tensors.

    These defaults are for the core's own families; a plugin provides its own (`Model.host`).
    """

    own_code: ClassVar[bool] = False
    """Whether the network's forward is the user's own code, which may refuse an input."""

    per_token: ClassVar[bool] = False
    """Whether every layer processes every token of an input, with a cache for earlier tokens."""

    steps: ClassVar[tuple[str, ...]] = ()
    """The names of the steps (`bundle.steps`) that add files to each bundle."""

    def with_k(self, model: Model, k: Mapping[str, int | None]) -> Model:
        """Returns a model whose own routers choose `k` experts per layer; it shares the weights.

        Returns the model itself if they already do, or if it has no routers. Raises `UsageError`
        for a k that a router does not support.
        """
        return model

    def with_token_axis(self, model: Model, option: str) -> Model:
        """Returns the model for any input length if its length is fixed, otherwise unchanged.

        Raises `UsageError`, naming `option`, if the network supports no other length.
        """
        return model

    def traced(
        self,
        network: nn.Module,
        model: Model,
        sizes: Mapping[str, int],
        fixed: Mapping[str, int],
        *,
        opset: int,
    ) -> ir.Model | None:
        """Returns the graph of a model's network with a node for each of its layers.

        Returns None to let PyTorch's own exporter trace it. Axes have the given `sizes`, and those
        in `fixed` are constants of the graph.
        """
        return None

    def benchmark(self, model: Model) -> str | None:
        """Returns the name of the benchmark for a sequence model (`bench.measure.sequences`)."""
        return None

    def experts_form(self, model: Model) -> str | None:
        """Returns how PyTorch computes the untouched model's experts; None if there is one way."""
        return None

    def in_form(self, model: Model, k: Mapping[str, int], form: str | None) -> nn.Module:
        """Returns the untouched model with k experts per token, in a form (`experts_form`).

        None keeps its own form. Raises `UsageError` if there are no forms.
        """
        raise UsageError(f"PyTorch computes the experts of {model.family} models in only one way")

    def repeated(
        self, network: nn.Module, tensors: Sequence[Tensor]
    ) -> Callable[[], Tensor] | None:
        """Returns a repeatable call of a network on tensors, which returns its first output.

        None if the network can simply be called again.
        """
        return None


IN_MEMORY = " (in memory)"
"""The suffix that marks the name of a network in memory; files and code never have it."""

CORE_HOST = Host()
"""The host of the core's families."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model came from: its files, or the code that built it.

    `mapped` are the files that its weights may be mapped from: `files`, and a file of converted
    weights. `further` are the plugin options for loading it again. It is `importable` unless it
    needs code in a notebook or in this script. `watched` are the files as they were loaded. `host`
    is provided by its loader. `in_memory` is the network of a model that was given in memory.
    """

    path: str
    files: tuple[Path, ...]
    mapped: tuple[Path, ...] = ()
    further: tuple[Any, ...] = ()
    importable: bool = True
    watched: Watched | None = None
    host: Host = field(default=CORE_HOST, compare=False, repr=False)
    in_memory: nn.Module | None = field(default=None, compare=False, repr=False)

    @property
    def loads_elsewhere(self) -> bool:
        """Whether another process can load it."""
        return self.importable and bool(self.files or names_code(self.path))

    def sha256(self) -> str:
        """Returns the SHA-256 of the files as they were loaded, or of weights in memory.

        Empty if code creates them. Raises CheckpointError if a file was changed, replaced or
        removed since.
        """
        if self.in_memory is not None:
            digest = hashlib.sha256()
            _add_weights(digest, self.in_memory, self.reading())
            return digest.hexdigest()
        if self.watched is None:
            return hash_files(self.files)
        self.watched.check()
        return self.watched.sha256

    def reading(self) -> Reading:
        """Returns a pass over the mapped weights; CheckpointError if a file was truncated."""
        return Reading(self.mapped, self.watched)

    @contextmanager
    def reporting_changes(self) -> Iterator[None]:
        """Replaces an error in the block by one that names a changed file, if there is one.

        Copying a removed part of a mapped file to another file raises OSError.
        """
        try:
            yield
        except (MoexportError, OSError):
            self.sha256()
            raise


@dataclass(frozen=True)
class Model:
    """A trained model, ready to trace.

    `module` is in eval mode, in float32 and needs no gradients; it takes a tensor for each of
    `inputs` and returns one for each of `outputs`. Its MoE layers are `MoELayer` modules.
    `original` is the untouched reference if that is not `module`: the user's own module if the
    model came from a factory, or the model before its `edits`. `as_trained` is `module` before
    its edits and with its trained k, if that differs. `order` names the MoE layers in
    execution order, if that differs from their order in the module. `rounded` models round to BF16
    internally, so differences may grow from float32's to BF16's. `config` has all the constructor
    arguments of the family, as JSON values. `notes` are about defaults used and keys skipped.
    """

    module: nn.Module
    family: str
    config: dict[str, Any]
    source: Source
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()
    original: nn.Module | None = None
    as_trained: nn.Module | None = None
    example: Inputs | None = field(default=None, compare=False)
    order: tuple[str, ...] = ()
    rounded: bool = False
    edits: Edits = NO_EDITS

    @property
    def input(self) -> TensorSpec:
        """The input that feeds provide; others have defaults."""
        return self.inputs[0]

    @property
    def output(self) -> TensorSpec:
        """The output on which accuracy is measured."""
        return self.outputs[0]

    @property
    def batch_of(self) -> int:
        """The number of inputs that are computed together; batch sizes are multiples of it."""
        return self.input.groups_of or 1

    @property
    def limits(self) -> dict[str, int]:
        """The largest sizes of axes, and of sums of axes, over all inputs."""
        return {axis: limit for spec in self.inputs for axis, limit in spec.limits.items()}

    @property
    def host(self) -> Host:
        """The loader's knowledge about the model."""
        return self.source.host

    @property
    def untouched(self) -> nn.Module:
        """The reference network for all comparisons: the user's own if there is one."""
        return self.module if self.original is None else self.original

    def zeros(self, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        """Returns inputs filled with zeros, with the given sizes of named axes."""
        return tuple(
            torch.zeros(spec.concrete(sizes), dtype=getattr(torch, spec.dtype))
            for spec in self.inputs
        )

    def with_module(self, module: nn.Module) -> Model:
        """Returns the model with `module`, a changed copy, in place of its own."""
        before = self.module if self.as_trained is None else self.as_trained
        return replace(self, module=module, original=self.untouched, as_trained=before)

    @property
    def layers(self) -> dict[str, MoELayer]:
        """The MoE layers by module path, in execution order."""
        layers = moe_layers(self.module)
        return {name: layers[name] for name in self.order or layers}

    @property
    def specs(self) -> dict[str, MoESpec]:
        """The specs of the MoE layers by module path, in execution order."""
        return {name: layer.spec for name, layer in self.layers.items()}

    @property
    def trained_k(self) -> dict[str, int]:
        """The number of experts that each MoE layer computed in training."""
        return {name: spec.trained_k for name, spec in self.specs.items()}


def check_one_input(model: Model, what: str, *, only_optional: bool = False) -> None:
    """Raises `UsageError` for a model of several inputs if `what` needs a single input.

    With `only_optional`, several inputs without defaults are allowed.
    """
    optional = any(spec.default is not None for spec in model.inputs)
    if optional if only_optional else len(model.inputs) > 1:
        raise UsageError(
            f"{what} needs a model with one input, but this {model.family} model has "
            f"{len(model.inputs)}",
            hint="models with token-routed experts can be exported, verified and run: "
            "docs/families.md#token-routed-models"
            if optional
            else "such networks can be exported, verified, run, measured, calibrated and tuned: "
            "docs/families.md#inputs-and-outputs",
        )


def fingerprint(model: Model) -> str:
    """Returns the SHA-256 of a model's family, configuration, edits and weights."""
    digest, reading = hashlib.sha256(), model.source.reading()
    facts = {"family": model.family, "config": model.config, "edits": model.edits.texts()}
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    _add_weights(digest, model.module, reading)
    return digest.hexdigest()


def _add_weights(digest: hashlib._Hash, module: nn.Module, reading: Reading) -> None:
    """Adds the names and values of a module's tensors to a digest."""
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # In parts: otherwise a transposed view of a checkpoint would be copied as a whole.
        for part in tensor if tensor.ndim > 2 else (tensor,):
            digest.update(np.ascontiguousarray(part.numpy()).data)
            reading.advance(part.nbytes)
    reading.end()


def edited(model: Model, edits: Edits) -> Model:
    """Returns the model with its layers edited; the model itself if there are no edits.

    The untouched module is its `original`, and all weights are shared. Raises UsageError for a
    missing layer, level, expert or output.
    """
    if not edits:
        return model
    specs = model.specs
    changes: list[Ablation | AblatedCombination | Rewrite | Steer]
    changes = [*edits.ablations, *edits.combinations, *edits.rewrites, *edits.steers]
    for change in changes:
        if change.layer not in specs:
            raise UsageError(
                f"{change.option}: the model has no MoE layer {change.layer}",
                hint=f"its MoE layers: {', '.join(specs)}",
            )
        if isinstance(change, Rewrite):
            _check_rewrite(change, specs[change.layer])
        elif isinstance(change, AblatedCombination):
            _check_combination(change, specs[change.layer])
        else:
            _check_expert(change, specs[change.layer])
    module = sharing_weights(model.module)
    layers = moe_layers(module)
    for change in changes:
        layers[change.layer].edits = edits.of(change.layer)
    for kept in edits.kept:
        _replace_layer(module, kept.layer, partial(_with_fewer_experts, kept))
    for merged in edits.merged:
        _replace_layer(module, merged.layer, partial(_with_merged_experts, merged))
    changed = replace(model.with_module(module), edits=edits)
    at_run_time = edits.at_run_time
    if not at_run_time:
        return changed
    strengths = TensorSpec(STEER_INPUT, "float32", ("batch", len(at_run_time)), default="zeros")
    steered = [layers[name] for name in {steer.layer: None for steer in edits.steers}]
    trained = changed.as_trained
    return replace(
        changed,
        module=Steered(module, steered),
        original=Steered(changed.untouched, ()),
        as_trained=None if trained is None else Steered(trained, ()),
        inputs=(*model.inputs, strengths),
    )


SUBSTITUTES_HINT = "substitutes.safetensors is next to the recipe, and in its bundle"
"""A hint on where the numbers that replace experts are stored."""


def _replace_layer(module: nn.Module, name: str, smaller: Callable[[MoELayer], MoELayer]) -> None:
    """Replaces a layer by one with fewer experts, wherever the module has it."""
    layer = moe_layers(module).get(name)
    if layer is None:
        raise UsageError(f"the model has no MoE layer {name}", hint="is it this model's recipe?")
    new = smaller(layer)
    for path, child in [*module.named_modules(remove_duplicate=False)]:
        if child is layer:
            module.set_submodule(path, new)


def _with_fewer_experts(kept: KeptExperts, layer: MoELayer) -> MoELayer:
    """Returns the layer with only some of its experts."""
    spec = layer.spec
    if not kept.experts or not set(kept.experts) <= set(range(spec.experts)):
        raise UsageError(
            f"{kept.text}: the layer has {spec.experts} experts",
            hint="experts are counted from 0; is it this model's recipe?",
        )
    if kept.constant:
        slots = spec.slots if isinstance(spec, SoftMoESpec) else 0
        shape = (spec.experts - len(kept.experts), slots, spec.out)
        _check_substitutes(kept.text, [kept.constants], [shape])
    smaller = layer.with_experts(kept.experts, kept.constants)
    if smaller is None:
        raise UsageError(
            f"{kept.text}: no experts of {kind_text(spec.kind)} can be dropped",
            hint="only those of Soft MoE layers can",
        )
    return smaller


def _with_merged_experts(edit: MergedExperts, layer: MoELayer) -> MoELayer:
    from ..graphs.layers.mumoe import MuMoE  # needed for this edit only

    if not isinstance(layer, MuMoE):
        raise UsageError(
            f"{edit.text}: the experts of {kind_text(layer.spec.kind)} cannot be merged",
            hint="only those of muMoE layers can",
        )
    tensors = layer.spec.tensors
    matrices = edit.matrices or (None,) * len(tensors)
    if len(matrices) != len(tensors):
        raise UsageError(
            f"{edit.text}: {len(matrices)} matrices, but it has {len(tensors)} tensors",
            hint=SUBSTITUTES_HINT,
        )
    _check_substitutes(edit.text, matrices, [(tensor.dim + 1, tensor.out) for tensor in tensors])
    return layer.merged([torch.from_numpy(matrix) for matrix in edit.matrices or ()])


def _check_substitutes(
    what: str, arrays: Sequence[np.ndarray | None], shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raises `UsageError` if the numbers that replace experts do not fit."""
    numbers = "the numbers that replace experts"
    for array, shape in zip(arrays, shapes, strict=True):
        if array is None:
            raise UsageError(f"{what}: {numbers} are missing", hint=SUBSTITUTES_HINT)
        if array.shape != shape or array.dtype != np.float32:
            raise UsageError(
                f"{what}: {numbers} are {array.dtype} {array.shape}, not float32 {shape}",
                hint=SUBSTITUTES_HINT,
            )
        if not np.isfinite(array).all():
            raise UsageError(f"{what}: {numbers} are not all finite", hint=SUBSTITUTES_HINT)


class Steered(nn.Module):
    """A network with an additional last input: the strengths [b, s] of its layers' steerings.

    Its modules have the same paths as in the original network.
    """

    def __init__(self, network: nn.Module, layers: Sequence[MoELayer]) -> None:
        super().__init__()
        for name, child in network.named_children():
            self.add_module(name, child)
        self._parts = (network, tuple(layers))  # in a tuple, so that no module is found twice

    @property
    def network(self) -> nn.Module:
        """The network that is steered."""
        return self._parts[0]

    def forward(self, *tensors: Tensor) -> Any:
        """Returns the network's result for all tensors except the last."""
        network, layers = self._parts
        for layer in layers:
            layer.strengths = tensors[-1]
        try:
            return network(*tensors[:-1])
        finally:
            for layer in layers:
                layer.strengths = None


def _check_index(what: str, index: int, count: int, unit: str) -> None:
    if not 0 <= index < count:
        raise UsageError(
            f"{what} has {count} {unit}", hint=f"they are counted from 0: use 0 to {count - 1}"
        )


def _check_expert(edit: Ablation | Steer, spec: MoESpec) -> None:
    """Raises `UsageError` for an expert that is missing or cannot be edited."""
    if isinstance(edit, Ablation) and getattr(spec, "out_activation", "identity") == "softmax":
        raise UsageError(
            f"{edit.option}: the experts of layer {spec.name} end in a softmax, which returns "
            "numbers above zero for weights of zero",
            hint="`moexport specialise` measures what each expert does",
        )
    if isinstance(edit, Steer) and not spec.rewritable:
        raise UsageError(
            f"{edit.option}: layer {spec.name} is {kind_text(spec.kind)}, whose experts have no "
            "cluster centre to compare tokens with",
            hint="only muMoE layers can be steered; --ablate works for all kinds",
        )
    count, what = len(spec.levels), f"{edit.option}: layer {spec.name}"
    sizes = ", ".join(f"{level} has {n}" for level, n in enumerate(spec.levels, start=1))
    if edit.level is None and count > 1:
        raise UsageError(
            f"{what} has {count} levels of experts",
            hint=f"name the level: {spec.name}:1.{edit.expert} is expert {edit.expert} of level "
            f"1 (experts by level: {sizes})",
        )
    level = 1 if edit.level is None else edit.level
    if not 1 <= level <= count:
        raise UsageError(
            f"{what} has no level {level}",
            hint=f"levels are counted from 1 (experts by level: {sizes})",
        )
    in_level = f" in level {level}" if count > 1 else ""
    _check_index(what, edit.expert, spec.levels[level - 1], f"experts{in_level}")


def _check_combination(edit: AblatedCombination, spec: MoESpec) -> None:
    what, levels = f"{edit.option}: layer {spec.name}", spec.levels
    if len(levels) < 2 or len(edit.experts) != len(levels):
        size = "one level" if len(levels) == 1 else f"{len(levels)} levels"
        raise UsageError(
            f"{what} has {size} of experts, but {len(edit.experts)} are named together",
            hint="EXPERT+EXPERT names one expert of each level"
            if len(levels) > 1
            else "name experts of one level after commas",
        )
    for level, (expert, n) in enumerate(zip(edit.experts, levels, strict=True), start=1):
        _check_index(what, expert, n, f"experts in level {level}")


def _check_rewrite(entry: Rewrite, spec: MoESpec) -> None:
    what = f"--rewrite: output {entry.output} of layer {spec.name}"
    if not spec.rewritable:
        raise UsageError(
            f"{what}: {kind_text(spec.kind)} has no coefficients to re-write an output with",
            hint="only muMoE layers can be re-written; --ablate works for all kinds",
        )
    _check_index(f"{what}: the layer", entry.output, spec.out, "outputs")
    lengths = tuple(len(vector) for vector in entry.coefficients)
    if lengths != tuple(spec.levels):
        given, wanted = (" and ".join(map(str, sizes)) for sizes in (lengths, spec.levels))
        raise UsageError(
            f"{what}: {given} coefficients, but the layer has {wanted} experts",
            hint="give one list per level, with the mean coefficient of every expert; "
            "`moexport specialise` writes them",
        )
