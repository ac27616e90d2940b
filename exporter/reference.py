"""Records what PyTorch computes, and finds the first layer where a graph differs from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook

from ..common.environment import available_bytes, grown_memory
from ..data.shards import Fields
from ..errors import MoexportError, ParityError, UsageError, in_one_line, tells_of_memory
from ..graphs.layers.base import MoELayer, algorithm_1, choice_key, recorded_choices
from ..graphs.layers.margins import routed_margins
from ..graphs.lower import LayerValues
from ..graphs.targets import runtime_of
from .bundle.parity_record import (
    GPU_RTOL,
    TOLERANCES,
    Reference,
    Rounded,
    Tolerance,
    by_expert,
    chunks,
    describe,
)
from .bundle.runtimes import opened
from .inputs import PARITY_BATCHES, SAMPLES, Inputs, completed, random_arrays
from .job import ExportJob
from .model import Model
from .parity import compare
from .session import SessionOptions


def torch_reference(job: ExportJob, x: Inputs, *, every_k: bool = True) -> Reference:
    """Returns what PyTorch computes for inputs of a job.

    Where k is chosen per run a quarter of the experts are kept and, with `every_k`, each number of
    `other_k`, too. The pages of mapped weights are given back on the way.
    """
    batch = job.largest_batch

    def computed(kept: Mapping[str, int]) -> Reference:
        renormalize = job.options.renormalize
        return reference(job.model, x, kept, renormalize=renormalize, batch=batch)

    with _pages_given_back(job.model):
        others = other_k(job) if every_k else ()
        at_other_k = {k: computed(kept_experts(job, k)) for k in others}
        return replace(computed(kept_experts(job)), at_other_k=at_other_k)


def depends_on_batch(model: Model, batch: int) -> bool:
    """Whether what a network gives for random inputs depends on the others of a batch.

    It does, too, where it cannot be run on one input alone.
    """
    arrays = random_arrays(model, max(batch, PARITY_BATCHES[1]))
    together = run_untouched(model, arrays)[0]
    try:
        alone = [run_untouched(model, part)[0] for part in chunks(arrays, 1)]
    except (RuntimeError, ValueError, IndexError, UsageError):
        return True
    off = np.abs(np.concatenate(alone) - together).max(initial=0.0)
    return not off <= GPU_RTOL * np.abs(together).max(initial=0.0)


MOST_BYTES = 512 << 20
"""The largest tensor that inputs of a size beyond the usual may make, as far as is foreseen."""

MOST_COPIED_BYTES = 256 << 20
"""What a graph may copy of its weights for such inputs: an export holds little but weights."""

MEMORY_SHARE = 0.25
"""Of the free memory what PyTorch may take for them: a graph takes some, too."""

MOST_SECONDS = 60.0
"""What PyTorch may take for inputs of a size beyond the usual, as far as it is foreseen."""


@dataclass(slots=True)
class Budget:
    """Which sizes are compared: those that take no more memory and time than a check may.

    What larger sizes take is foreseen from the inputs before, of which `timed` computes the
    reference. `copied_bytes` are those of the weights that a graph copies for a batch of tokens.
    """

    job: ExportJob
    copied_bytes: Callable[[int, int], float]
    batches: tuple[int, ...] = ()
    _last: tuple[int, int, float] = (1, 1, 0.0)
    """Inputs, their tokens, and seconds."""
    _row_bytes: int = 0
    _grown: int = 0
    _beyond: dict[str, list[int]] = field(default_factory=dict)

    def timed(self, x: Inputs, *, every_k: bool = True) -> Reference:
        """Returns what PyTorch computes for inputs (`torch_reference`)."""
        began = time.thread_time()  # what others do on the machine does not count
        with grown_memory() as memory:
            expected = torch_reference(self.job, x, every_k=every_k)
        self._grown = memory.nbytes
        seconds = time.thread_time() - began
        spec = self.job.model.input
        at = spec.shape.index("tokens") if "tokens" in spec.shape else None
        self._last = len(expected.x), 1 if at is None else expected.x.shape[at], seconds
        self._row_bytes = sum(
            array[:1].nbytes for array in (expected.x, expected.y, *expected.outputs.values())
        )
        return expected

    def choose_batches(self, changes: Sequence[int]) -> None:
        """Chooses the batch sizes of the job that are compared."""
        rows, tokens, _ = self._last
        self.batches = tuple(
            size
            for size in self.job.probed_batches(changes)
            if size <= rows or self.affords(size, tokens, axis="batch")
        )

    def affords(
        self, rows: int, tokens: int, axis: str = "tokens", *, needed: bool = False
    ) -> bool:
        """Whether so many inputs of so many tokens are compared; if not, `notes` tell of it.

        What is `needed` may take any time.
        """
        last_rows, last_tokens, seconds = self._last
        longer = tokens / last_tokens
        specs = [layer.spec for layer in self.job.model.layers.values()]
        widest = max(spec.experts * max(spec.hidden, spec.dim) for spec in specs)
        floats = rows * max(tokens * widest, self._row_bytes // 4 * longer, HEADS * tokens**2)
        quick = needed or seconds * rows / last_rows * longer <= MOST_SECONDS
        grows = self._grown * rows / last_rows * longer <= MEMORY_SHARE * available_bytes()
        copied = self.copied_bytes(rows, tokens) <= MOST_COPIED_BYTES
        fits = 4 * floats <= MOST_BYTES and copied and grows and quick
        if not fits:
            self._beyond.setdefault(axis, []).append(rows if axis == "batch" else tokens)
        return fits

    def notes(self) -> tuple[str, ...]:
        """Returns sentences on the sizes that were not compared."""
        return tuple(
            f"{'batches' if axis == 'batch' else 'inputs'} of {', '.join(map(str, sorted(sizes)))}"
            f"{'' if axis == 'batch' else ' tokens'} were not compared: that takes more than "
            f"{MOST_BYTES >> 20} MiB for one tensor, {MOST_COPIED_BYTES >> 20} MiB for copies of "
            f"weights, {MEMORY_SHARE:.0%} of the free memory or {MOST_SECONDS:.0f} s"
            for axis, sizes in self._beyond.items()
        )


HEADS = 16
"""Of attention, as far as it is foreseen what scores between tokens take."""


def run_untouched(model: Model, x: Fields) -> list[np.ndarray]:
    """Returns what the untouched model gives for inputs."""
    return _Network(model, model.untouched).outputs(x)


EXACT_BYTES = 512 << 20
"""Of larger weights no second copy is made, in float64: their FP32 graphs have one bound alone."""


def with_exact(job: ExportJob, expected: Reference) -> Reference:
    """Returns a reference with what PyTorch computes in float64, with every k that it is of."""
    others = {k: with_exact(job, other) for k, other in expected.at_other_k.items()}
    return replace(expected, rounded=_exact(job, expected), at_other_k=others)


def _exact(job: ExportJob, expected: Reference) -> Rounded | None:
    """What PyTorch computes for the inputs of a reference in float64.

    None where weights are larger than `EXACT_BYTES`, or the network cannot be run so.
    """
    model = job.model
    weights = dict((*model.module.named_parameters(), *model.module.named_buffers()))
    if sum(weight.nbytes for weight in weights.values()) > EXACT_BYTES:
        return None
    y: list[np.ndarray] = []
    selected: dict[str, list[np.ndarray]] = {}
    # Few inputs at once, but no fewer than a batch may be.
    few = max(SAMPLES // job.least_batch, 1) * job.least_batch
    batch = job.whole_batch or min(few, job.largest_batch)
    network = _InFloat64(model, model.module, expected.kept, renormalize=job.options.renormalize)
    with _pages_given_back(model):
        try:
            for part in chunks(expected.feeds(model.input.name), batch):
                computed = network.computed(part)
                y.append(computed.outputs[0])
                for name, sets in expected.selected.items():
                    chosen = computed.choices[name][0]
                    wanted = (len(y[-1]), *sets.shape[1:])
                    selected.setdefault(name, []).append(chosen.reshape(wanted))
        except Exception:  # noqa: BLE001  a network may insist on float32: nothing is known then
            return None
    outputs = np.concatenate(y)
    if outputs.dtype != np.float64 or not np.isfinite(outputs).all():
        return None
    return Rounded(outputs, {name: np.concatenate(parts) for name, parts in selected.items()})


def kept_experts(job: ExportJob, shared: int | None = None) -> dict[str, int]:
    """Returns each layer's k in a comparison.

    Where it is an input that is the `shared` one of all layers; without it a quarter of the
    experts.
    """
    # One k serves all layers at run time, so the layer with the fewest experts bounds it.
    shared = shared or max(1, _fewest_experts(job) // 4)
    return {name: shared if k is None else k for name, k in job.k.items()}


def other_k(job: ExportJob) -> list[int]:
    """Returns each k that is compared beside `kept_experts`, where it is an input of the graph.

    Those are 1, a quarter, half and all of the experts of each layer, at each of its levels, and as
    many as its router chose in training.
    """
    if None not in job.k.values():
        return []
    found = {1}
    for spec in (layer.spec for layer in job.model.layers.values()):
        found |= {spec.trained_k, *(n // part for n in spec.levels for part in (1, 2, 4))}
    found -= {0, *kept_experts(job).values()}
    return sorted(k for k in found if k <= _fewest_experts(job))


def _fewest_experts(job: ExportJob) -> int:
    return min(layer.spec.experts for layer in job.model.layers.values())


@contextmanager
def _pages_given_back(model: Model) -> Iterator[None]:
    """Within the context the pages of mapped weights are given back once a module has run."""
    reading = model.source.reading()

    def count(module: nn.Module, *_: object) -> None:
        lists = (part for part in module.children() if isinstance(part, nn.ParameterList))
        own = (weight for part in (module, *lists) for weight in part.parameters(recurse=False))
        reading.advance(sum(weight.nbytes for weight in own))

    # Of all modules, as a factory's own network keeps its experts where it likes.
    hook = register_module_forward_hook(count)
    try:
        yield
    finally:
        hook.remove()
        reading.end()


def reference(
    model: Model, x: Inputs, kept: Mapping[str, int], *, renormalize: bool, batch: int
) -> Reference:
    """Returns what PyTorch computes for inputs x, in batches of `batch`.

    Where every layer computes what it was trained with, that is what the untouched network gives.
    """
    ours = _Network(model, model.module, kept, renormalize=renormalize)
    arrays = completed(x, model.inputs)
    untouched = _Network(model, model.untouched)
    trained = model.as_trained is None and not renormalize and kept == _trained(model)
    dense, outputs = [], []
    selected: dict[str, list[np.ndarray]] = {}
    margin: dict[str, list[np.ndarray]] = {}
    apart: set[str] = set()
    for part in chunks(arrays, batch):
        values = untouched.outputs(part)
        dense.append(values[0])
        computed = ours.computed(part)
        outputs.append(values if trained else computed.outputs)
        rows = len(values[0])
        for name, choice in computed.choices.items():
            chosen, gap = choice
            if len(chosen) != rows:  # of tokens, which the layer sees one after the other
                if len(chosen) % rows:  # not those of single inputs: the values alone decide
                    apart.add(name)
                    continue
                chosen = chosen.reshape(rows, -1, *chosen.shape[1:])
                gap = gap.reshape(rows, -1, *gap.shape[1:])
            selected.setdefault(name, []).append(chosen)
            margin.setdefault(name, []).append(gap)
    for name, parts in selected.items():  # as many of each input, or no input's own
        if len({part.shape[1:] for part in parts}) > 1:
            apart.add(name)
    first, *further = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
    rest = iter(arrays.items())
    _, inputs = next(rest)
    return Reference(
        x=inputs,
        y=first,
        dense=np.concatenate(dense),
        selected={n: np.concatenate(parts) for n, parts in selected.items() if n not in apart},
        margin={n: np.concatenate(parts) for n, parts in margin.items() if n not in apart},
        kept=dict(kept),
        inputs=dict(rest),
        outputs={spec.name: y for spec, y in zip(model.outputs[1:], further, strict=True)},
    )


def _trained(model: Model) -> dict[str, int]:
    """How many experts each layer of a model computes as it was trained."""
    return {name: layer.spec.trained_k for name, layer in model.layers.items()}


def check_network(job: ExportJob, expected: Reference, batches: Sequence[int]) -> None:
    """Raises `ParityError` where the model itself is not what a graph can be compared with.

    On the inputs of the reference our layers, as they were trained, must give what the untouched
    network gives; and where the batch is no constant of the graph, what PyTorch gives for an input
    must not depend on the others of its batch, but for those that it is computed together with: it
    is run in `batches` of these sizes.
    """
    model, options = job.model, job.options
    bounds = TOLERANCES["fp32"]
    if options.precision.name == "fp32":  # wider where the user said so
        atol, rtol = options.tolerance.atol, options.tolerance.rtol
        bounds = replace(bounds, atol=atol, rtol=max(bounds.rtol, rtol))
    with _pages_given_back(model):
        ours = model.module if model.as_trained is None else model.as_trained
        trained = replace(model, module=ours, as_trained=None)
        most = job.checked_batch
        x = _several(expected.feeds(model.input.name), most)
        batch = job.largest_batch
        whole = reference(trained, x, _trained(trained), renormalize=False, batch=batch)
        if model.untouched is not ours:
            _check_stand_ins(trained, whole, batch, bounds)
        if job.fixed_batch is not None:
            return
        network = _Network(trained, trained.untouched, _trained(trained))
        _check_batches(network, whole, bounds, batches)
        kept, renormalize = expected.kept, options.renormalize
        if ours is not model.module or kept != whole.kept or renormalize:
            changed = reference(model, x, kept, renormalize=renormalize, batch=batch)
            network = _Network(model, model.module, kept, renormalize=renormalize)
            _check_batches(network, changed, bounds, batches)


def _several(arrays: Fields, count: int) -> Fields:
    """So many inputs at least: where there are fewer, the same again, turned along an axis.

    A batch of one input, several times over, does not show what depends on the others in it.
    """
    samples, *_ = (len(array) for array in arrays.values())
    if samples >= count:
        return arrays
    turned: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        rows = array[np.arange(count) % samples]
        if name == next(iter(arrays)) and array.ndim > 1:
            axis = next((axis for axis in range(1, array.ndim) if array.shape[axis] > 1), 1)
            rows = np.stack([np.roll(row, i // samples, axis - 1) for i, row in enumerate(rows)])
        turned[name] = rows
    return turned


def _check_stand_ins(model: Model, expected: Reference, batch: int, bounds: Tolerance) -> None:
    """Raises `ParityError` where our layers give something else than the user's own."""
    ours = _Network(model, model.module, expected.kept)
    parity = compare(ours, expected, ours.keys, batch=batch, tolerance=bounds)
    if parity.passed:
        return
    name = ", ".join(model.layers)
    raise ParityError(
        f"{model.source.path}: the network's outputs change when its layers ({name}) are replaced: "
        f"{describe(parity)}",
        hint="the adapter matched on the example but not on these inputs: does it describe "
        "everything the layer does? With --data the layers are compared on your inputs when the "
        "model is loaded",
    )


def _check_batches(
    network: _Network, expected: Reference, bounds: Tolerance, sizes: Sequence[int]
) -> None:
    """Raises `ParityError` where an input's output depends on the others in its batch."""
    count = len(expected.x)
    for size in sizes:
        rows = expected.rows(np.arange(size) % count)
        parity = compare(network, rows, network.keys, batch=size, tolerance=bounds)
        if parity.passed or parity.tied == parity.choices:
            continue
        where = f", starting in layer {parity.first_difference}" if parity.first_difference else ""
        raise ParityError(
            f"in PyTorch the output for an input depends on the others in its batch{where}: "
            f"a batch of {size} gives something else than one of {count} ({describe(parity)})",
            hint="--batch N exports it for batches of N alone; for any batch its router must "
            "choose for each input by itself, without a capacity or statistics over the batch",
        )


@dataclass(frozen=True, slots=True)
class _Computed:
    """One pass: the outputs, and each choice with the margin by which it was made."""

    outputs: list[np.ndarray]
    choices: dict[str, tuple[np.ndarray, np.ndarray]]


class _Network:
    """A network in PyTorch, run as a graph is (`exporter.session.GraphSession`).

    `network` gives the outputs; what was chosen is that of the model's own module, with so many
    experts `kept`.
    """

    takes_k = False
    provider = "PyTorch"

    def __init__(
        self,
        model: Model,
        network: nn.Module,
        kept: Mapping[str, int] | None = None,
        *,
        renormalize: bool = False,
    ) -> None:
        self._model, self._network = model, network
        self._kept, self._renormalize = dict(kept or {}), renormalize
        self.input_name = model.input.name
        self.output_names = [spec.name for spec in model.outputs]
        layers = model.layers
        self.keys = {
            key: key
            for name, k in self._kept.items()
            if k < layers[name].spec.experts or layers[name].spec.drops
            for key in (choice_key(name, choice) for choice in layers[name].spec.choices())
        }

    def __call__(self, x: Inputs, k: int | None = None) -> np.ndarray:
        return self.run(x, k)[self.output_names[0]]

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns outputs and choices by name."""
        del k, outputs
        arrays = dict(x) if isinstance(x, Mapping) else {self.input_name: x}
        computed = self.computed({spec.name: arrays[spec.name] for spec in self._model.inputs})
        own = self._network is self._model.module
        values = computed.outputs if own else self.outputs(arrays)
        choices = {name: chosen for name, (chosen, _) in computed.choices.items()}
        return {**dict(zip(self.output_names, values, strict=True)), **choices}

    @torch.no_grad()
    def outputs(self, arrays: Fields) -> list[np.ndarray]:
        """Returns what the network gives, as it is."""
        return self._values(self._network, arrays)

    @torch.no_grad()
    def computed(self, arrays: Fields) -> _Computed:
        """Returns what the model's own module gives and chooses with the experts that are kept."""
        module = self._model.module
        with (
            algorithm_1(module, self._kept, renormalize=self._renormalize),
            recorded_choices(module) as records,
            routed_margins(module) as margins,
        ):
            values = self._values(module, arrays)
        choices: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name in (key for key in self.keys if key in records):
            chosen = records[name].chosen.numpy()
            margin = margins.get(name, records[name].margin).numpy()
            chosen = by_expert(chosen) if margin.shape == chosen.shape else chosen
            choices[name] = chosen, margin
        return _Computed(values, choices)

    def _values(self, module: nn.Module, arrays: Fields) -> list[np.ndarray]:
        tensors = [
            torch.from_numpy(np.array(arrays[spec.name])) for spec in self._model.inputs
        ]  # copies: a network may change its inputs in place
        with _told(self._model, len(tensors[0])):
            values = all_outputs(module(*tensors))[: len(self._model.outputs)]
        return [value.numpy() for value in values]


@contextmanager
def _told(model: Model, count: int) -> Iterator[None]:
    """Within the context a user's own network runs on so many inputs: it may refuse them."""
    try:
        yield
    except Exception as error:  # the user's code may fail in any way
        if not model.host.own_code or isinstance(error, MoexportError) or tells_of_memory(error):
            raise
        raise UsageError(
            f"{model.source.path}: its forward failed on a batch of {count}: {in_one_line(error)}",
            hint="if it takes some batches alone, --batch N exports it for batches of N",
        ) from error


class _InFloat64(_Network):
    """The same in float64; the weights of the network stay as they are."""

    def _values(self, module: nn.Module, arrays: Fields) -> list[np.ndarray]:
        weights = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays.values()]
        tensors = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
        values = all_outputs(functional_call(module, weights, tuple(tensors)))
        return [value.numpy() for value in values[: len(self._model.outputs)]]


@torch.no_grad()
def first_different_layer(
    job: ExportJob, path: Path, values: Mapping[str, LayerValues], expected: Reference
) -> str:
    """Returns where a graph first differs, in words: a layer, or the network around it.

    The inputs and outputs of every MoE layer are compared in order, on the first inputs.
    """
    model, rtol = job.model, job.options.tolerance.rtol
    x = expected.feeds(model.input.name, job.fixed_batch)
    names = {name for layer in values.values() for name in (layer.input, layer.output)}
    observe = dict.fromkeys(sorted(names), onnx.TensorProto.FLOAT)
    runtime = runtime_of(job.options.target)
    options = SessionOptions(runtime=runtime, plan_memory=False, observe=observe, rounded=True)
    session = opened(path, options)
    actual = session.run(x, next(iter(expected.kept.values())) if session.takes_k else None)
    wanted: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any, name: str) -> None:
        assert isinstance(module, MoELayer)
        wanted[name] = (module.tokens(args[0]).numpy(), output.numpy())

    renormalize = job.options.renormalize
    with (
        ExitStack() as hooks,
        algorithm_1(model.module, {**expected.kept}, renormalize=renormalize),
    ):
        for name, layer in model.layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
        model.module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in x.values()))
    before = "the network before it"
    for name, value in values.items():
        wanted_input, wanted_output = wanted[name]
        if _differs(actual[value.input], wanted_input, rtol):
            return f"{before}, at the input of layer {name}"
        if _differs(actual[value.output], wanted_output, rtol):
            return f"layer {name}"
        before = f"the network after layer {name}"
    return f"{before.replace('before it', 'before the layers')}, at the output"


def _differs(actual: np.ndarray, wanted: np.ndarray, rtol: float) -> bool:
    """Whether some row is further off than its own largest number allows."""
    rows = len(wanted)
    largest = np.abs(wanted).reshape(rows, -1).max(axis=1, initial=0.0)
    off = np.abs(actual - wanted).reshape(rows, -1).max(axis=1, initial=0.0)
    return not bool((off <= rtol * largest).all())


def all_outputs(output: Any) -> tuple[torch.Tensor, ...]:
    """Returns a backbone's output tensors; what is no tensor of a tuple is left out."""
    values = output if isinstance(output, tuple) else (output,)
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def first_output(output: Any) -> torch.Tensor:
    """Returns a backbone's output tensor; published layers give a tuple with auxiliary values."""
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, torch.Tensor)
    return value
