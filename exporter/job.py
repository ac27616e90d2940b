"""The job of an export: what was asked, resolved for one model before any work begins.

`export_job` makes it, once, and refuses all that can be refused without calibrating, tracing or
writing; what comes after is handed the whole job and resolves nothing again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..calibration.methods import DEFAULT_METHOD
from ..calibration.table import CalibrationTable
from ..common.option import Mistake, refuse
from ..data.feeds import Feed
from ..errors import CalibrationError, LoweringError, UsageError
from ..graphs.layers.base import MoESpec
from ..graphs.lowerings.choice import check
from ..graphs.lowerings.cost import AnyWork, WorkOf
from ..graphs.names import DOMAIN, PAST, operand_of
from ..graphs.precision.weights import not_in_blocks
from ..graphs.targets import TARGETS
from .bundle.destination import check_destination
from .bundle.parity_record import ROUNDED_RTOL
from .bundle.runtimes import check_computes, check_engine
from .bundle.steps import STEPS, Step, asked
from .inputs import (
    BATCH,
    DEFAULT_BATCH,
    DEFAULT_TOKENS,
    PARITY_BATCHES,
    TRACED_BATCH,
    TRACED_SIZES,
    AxisRange,
)
from .model import Model, TensorSpec, check_given_inputs, check_one_input, edited, fingerprint
from .options import CHOOSERS, ExportOptions, check_renormalize, parse_k, parsed, resolve_k
from .quantization.calibrate import AGAIN, CalibrationJob, renormalised
from .requests import CalibrateRequest, ExportRequest

PEAK_SAMPLES = 64
"""Inputs whose largest values tell whether FP16 overflows, with `fp16.HEADROOM` to spare."""

_TOKEN_AXES = frozenset({"tokens", "height", "width"})
"""Axes of which `--tokens` says something: of an image it is the number of pixels."""

NO_FACTORS = "its weight tensor is held whole, and integer products are those of factors"


NO_EXPERTS = "it has no matrices of experts, which are what is written in blocks"


@dataclass(frozen=True, slots=True)
class ExportJob:
    """Everything that an export does, of which nothing has begun.

    `model` has its edits. `k` is each layer's, None where it is a graph input, and `fixed` the
    sizes of the axes that are constants of the graph. The ranges of tensors are those of `table`,
    or will be found by `calibration`; without either none are needed.
    """

    model: Model
    options: ExportOptions
    k: Mapping[str, int | None]
    fixed: Mapping[str, int]
    table: CalibrationTable | None = None
    calibration: CalibrationJob | None = None

    @property
    def fixed_batch(self) -> int | None:
        """The batch size where it is a constant of the graph."""
        return self.options.batch.opt if self.options.batch.fixed else None

    @property
    def ranges(self) -> dict[str, AxisRange]:
        """The sizes of axes that may vary and of which the options say something."""
        asked = {"batch": self.options.batch, "tokens": self.options.tokens}
        most = {axis: n for spec in self.model.inputs for axis, n in spec.limits.items()}
        most |= {axis.split(" + ")[-1]: n for axis, n in most.items() if " + " in axis}
        return {
            axis: AxisRange(*(min(n, most.get(axis, n)) for n in (sizes.min, sizes.opt, sizes.max)))
            for axis, sizes in asked.items()
            if axis in self.model.input.dynamic_axes and axis not in self.fixed
        }

    @property
    def groups_of(self) -> int | None:
        """The inputs of which a batch is a multiple, where its size may vary."""
        return self.model.input.groups_of if self.fixed_batch is None else None

    @property
    def whole_batch(self) -> int | None:
        """The size of batches that the graph takes whatever it is; None where any will do."""
        return self.fixed_batch or self.groups_of

    @property
    def least_batch(self) -> int:
        """The smallest batch that the graph is for."""
        return self.whole_batch or self.options.batch.min

    @property
    def checked_batch(self) -> int:
        """The size of batches in which inputs are compared: not the one that is traced."""
        return self.fixed_batch or self.options.batch.compared(self.model.batch_of)

    @property
    def largest_batch(self) -> int:
        """The size of the largest batch that inputs are computed in."""
        return self.fixed_batch or self.options.batch.largest(self.model.batch_of)

    def probed_batches(self, more: Iterable[int] = ()) -> tuple[int, ...]:
        """Returns the batch sizes at which a graph is compared; none where that is fixed."""
        if self.fixed_batch is not None:
            return ()
        of = self.model.batch_of
        return self.options.batch.probed(of, [*(size * of for size in PARITY_BATCHES), *more])

    @property
    def traced_sizes(self) -> dict[str, int]:
        """The sizes of axes while the model is traced: within the ranges that are asked for."""
        sizes = {**TRACED_SIZES, BATCH: TRACED_BATCH * self.model.batch_of}
        return {axis: sizes_of.nearest(sizes[axis]) for axis, sizes_of in self.ranges.items()}

    @property
    def decodes(self) -> bool:
        """Whether the model writes texts, a token at a time, with a cache of the earlier ones."""
        return decodes(self.model, self.options)

    @property
    def writes_text(self) -> bool:
        """Whether that is all it takes: a decoder alone also reads what its encoder gives."""
        return writes_text(self.model, self.options)

    @property
    def steps(self) -> list[Step]:
        """What plugins do in it: what the model brings along, then what is asked for."""
        return _steps(self.model, self.options)

    def work(self, layer: str, tokens: int, *, fixed: bool = False) -> AnyWork:
        """What a layer has to compute for one batch, of `tokens` m where its input has them.

        `fixed`: they are a constant of the network.
        """
        options, spec, k = self.options, self.model.layers[layer].spec, self.k[layer]
        # With k as an input the plan must be good for every k: a quarter of n stands for them.
        typical = k if k is not None else max(1, spec.experts // 4)
        precisions = options.precision
        floats = layer in precisions.floating
        precision = precisions.float_name(options.target) if floats else precisions.name
        return WorkOf(
            spec=spec,
            k=typical,
            batch=options.batch.opt,
            tokens=tokens,
            precision=precision,
            tokens_fixed=fixed,
        )

    def works(self, traced: ir.Model) -> dict[str, AnyWork]:
        """The work of each traced layer, in the order of execution."""
        works = {}
        for node in traced.graph:
            if node.domain == DOMAIN:
                x = node.inputs[0]
                size = x.shape[-2] if x is not None and x.shape is not None else None
                tokens = size if isinstance(size, int) else None
                layer = node.attributes.get_string("layer")
                if self.model.layers[layer].spec.flat:  # the tokens of the whole batch
                    tokens = _tokens_of_an_input(size, self.options.batch.opt)
                count = self.options.tokens.opt if tokens is None else tokens
                works[layer] = self.work(layer, count, fixed=tokens is not None)
        return works


def _tokens_of_an_input(size: int | ir.SymbolicDim | None, batch: int) -> int | None:
    """How many of `size` rows an input has: a number, or `196*batch`; None where that varies."""
    if isinstance(size, int):
        return max(1, size // batch)
    of_batch = re.fullmatch(r"(?:(\d+)\*)?batch", str(getattr(size, "value", size)))
    return int(of_batch[1] or 1) if of_batch else None


def decodes(model: Model, options: ExportOptions) -> bool:
    """Whether a model's graphs write texts, a token at a time, with a cache of the earlier ones."""
    cached = any(spec.name.startswith(PAST) for spec in model.inputs)
    fixed = options.tokens.fixed and "tokens" in model.input.dynamic_axes
    return model.host.of_tokens and cached and not fixed


def writes_text(model: Model, options: ExportOptions) -> bool:
    """Whether that is all they take: a decoder alone also reads what its encoder gives."""
    return decodes(model, options) and model.input.name == "input_ids"


def _steps(model: Model, options: ExportOptions) -> list[Step]:
    return [*(STEPS[name] for name in model.host.steps), *asked(options)]


def requested(request: ExportRequest, destination: Path | None) -> ExportOptions:
    """Returns the options of an export, parsed, with what those of plugins stand for.

    Raises `UsageError` for what cannot be meant.
    """
    for step in STEPS if request.further else ():
        step.refuses(request)
    options = parsed(request, destination)
    for step in asked(options):
        options = step.change(options, request)
    return options


def export_job(
    model: Model | Callable[[], Model], options: ExportOptions | None = None, **more: Any
) -> ExportJob:
    """Returns the job of an export, or raises what would keep it from being done.

    `model` may be a function that loads it: what needs no model is refused before it is called.
    `more` are fields of `options` that take the place of those.

    Raises `UsageError` for what cannot be meant, `BundleError` for a destination that cannot be
    written, `CalibrationError` for a table of another model or of fewer experts, `LoweringError`
    for a layer that the lowering or the precision does not serve, and `EngineError` or
    `MissingExtraError` for an engine that was asked for and cannot be built here.
    """
    options = replace(options or ExportOptions(), **more)
    options.precision.check(options.target)
    for step in asked(options):
        refuse(step.check(options, None))
    options.check_inputs()
    check_engine(options.target, options.engine)
    if options.verify:  # what compares, computes
        check_computes(options.precision.name, options.target)
    if options.destination is not None:
        check_destination(options.destination, force=options.force)
    table, where = options.calibration, "the table"
    if isinstance(table, Path):
        table, where = CalibrationTable.read(table), str(table)
    loaded = model if isinstance(model, Model) else model()
    refuse(_mistakes(loaded, options))
    for step in _steps(loaded, options):
        refuse(step.check(options, loaded))
    options = _in_groups(loaded, options)
    if loaded.rounded and options.held_to_rounding:
        options = replace(options, rtol=ROUNDED_RTOL)
    if options.precision.min_retention is not None:
        check_one_input(loaded, "--min-retention")
    varies = "tokens" in loaded.input.shape
    if options.tokens != DEFAULT_TOKENS and not varies:
        loaded = loaded.host.with_token_axis(loaded, f"--tokens {options.tokens}")
    fixed = fixed_axes(loaded.input, options)
    changed = edited(loaded, options.edits)
    k = resolve_k(options.k, _specs(changed))
    changed = changed.host.with_k(changed, k)
    job = ExportJob(model=changed, options=options, k=k, fixed=fixed, table=table)
    refuse(_mistakes_of_job(job))
    _check_layers(job)
    _check_blocks(job)
    if table is not None:
        check_table(job, table, where, loaded)
        return job
    return replace(job, calibration=_ranges(job))


def _ranges(job: ExportJob) -> CalibrationJob | None:
    """How the ranges of a job without a table are found; None where it needs none.

    Raises `UsageError` where there are no inputs to find them on.
    """
    model, options, precision = job.model, job.options, job.options.precision
    if precision.ranged and not _needs_ranges(model, options):
        return None  # each row's scale is found while the graph runs
    if options.data is None:
        if precision.ranged:
            raise UsageError(
                f"--precision {precision.name}: its ranges need real inputs",
                hint="give a feed with --data, or a table with --calibration",
            )
        return None
    # In FP16, what overflows is looked for in models whose inputs a feed has.
    several = any(spec.default is not None for spec in model.inputs) and precision.name == "fp16"
    if several or not options.finds_ranges:
        return None
    check_given_inputs(model, "--quantize all" if precision.scope == "all" else "--data")
    request = CalibrateRequest(
        method=options.method or DEFAULT_METHOD,
        samples=None if precision.ranged else PEAK_SAMPLES,
        renormalize=options.renormalize,
    )
    return CalibrationJob(model, options.data, _observed(job.k, _specs(model)), request, job.fixed)


def _in_groups(model: Model, options: ExportOptions) -> ExportOptions:
    """The options with batches of the inputs that a model computes together.

    Raises UsageError for a batch that is no multiple of them.
    """
    images, batch = model.batch_of, options.batch
    if images == 1:
        return options
    if batch == DEFAULT_BATCH:
        most = -(-batch.max // images) * images
        return replace(options, batch=AxisRange(images, images, most))
    if any(size % images for size in (batch.min, batch.opt, batch.max)):
        raise UsageError(
            f"--batch {batch}: the model routes the tokens of {images} inputs together",
            hint=f"--batch {images}:{images}:{4 * images}, or other multiples of {images}; one "
            "input is routed by itself with a smaller group_size, or without a capacity_factor",
        )
    return options


def _needs_ranges(model: Model, options: ExportOptions) -> bool:
    """Whether something becomes INT8 whose rows have no scales of their own."""
    if options.precision.quant_format(options.target) == "qdq":
        return True
    return not all(layer.spec.dynamic_int8 for layer in model.layers.values())


def calibration_job(
    model: Model,
    data: Feed,
    options: CalibrateRequest | None = None,
    *,
    fixed: Mapping[str, int] | None = None,
) -> CalibrationJob:
    """Returns the job of a calibration; raises `UsageError` for what the model does not take.

    `fixed` are the sizes of axes that are constants of the graph.
    """
    options = options or CalibrateRequest()
    check_given_inputs(model, "calibration")
    specs = _specs(model)
    if options.renormalize:
        check_renormalize(specs)
    k = resolve_k(parse_k(options.k), specs)
    return CalibrationJob(model, data, _observed(k, specs), options, fixed or {})


def _specs(model: Model) -> dict[str, MoESpec]:
    return {name: layer.spec for name, layer in model.layers.items()}


def _observed(k: Mapping[str, int | None], specs: Mapping[str, MoESpec]) -> dict[str, int]:
    """How many experts are observed: all where any may be kept at run time."""
    return {name: specs[name].experts if kept is None else kept for name, kept in k.items()}


def _mistakes(model: Model, options: ExportOptions) -> Iterator[Mistake]:
    """What makes no sense of a model as it was loaded.

    A network of the user's own is tried on the data when it is loaded.
    """
    if options.data is not None and not options.reads and not model.host.own_code:
        yield (
            "--data: nothing is calibrated and --no-verify compares nothing",
            "leave --data or --no-verify out",
        )
    inside = {id(parameter) for layer in model.layers.values() for parameter in layer.parameters()}
    beside = any(id(parameter) not in inside for parameter in model.module.parameters())
    if options.precision.scope == "all" and not beside:
        yield (
            "--quantize all: the model has no linear layers outside its MoE layers",
            "leave --quantize out",
        )
    engines = TARGETS[options.target].compiled
    if engines and len(model.inputs) > 1:
        yield (
            f"--target {options.target}: engines are built of graphs with one input, and this "
            f"model has {len(model.inputs)}",
            "use --target ort-cuda for a GPU, or ort-cpu",
        )


def _mistakes_of_job(job: ExportJob) -> Iterator[Mistake]:
    """What makes no sense of the model as it will be written, with its k."""
    specs = _specs(job.model)
    if job.options.expose_routing and all(
        job.k[name] == spec.experts and not spec.drops for name, spec in specs.items()
    ):
        yield (
            "--expose-routing: every layer computes all of its experts, so there is no routing "
            "to expose",
            "leave --expose-routing out, or choose a k below n",
        )


def _check_layers(job: ExportJob) -> None:
    """Raises for a layer that cannot be renormalised, lowered or quantised as asked."""
    options, precision = job.options, job.options.precision
    unknown = precision.floating - job.model.layers.keys()
    if unknown:
        raise UsageError(
            f"no MoE layer is called {', '.join(sorted(unknown))}",
            hint=f"the layers are {', '.join(job.model.layers)}",
        )
    if options.renormalize:
        check_renormalize(_specs(job.model))
    for name, layer in job.model.layers.items():
        work = job.work(name, options.tokens.opt)
        for lowering in options.lowerings:
            if lowering not in CHOOSERS:
                check(lowering, work, options.target)
        quantised = precision.ranged and name not in precision.floating
        if precision.name == "int4" and not any(
            part.name.startswith("experts.") for part in layer.stored()
        ):
            raise LoweringError(
                f"layer {name}: --precision int4 does not serve this layer: {NO_EXPERTS}",
                hint="use --precision int8 or fp32",
            )
        if quantised and not any(operand_of(part.name) for part in layer.stored()):
            raise LoweringError(
                f"layer {name}: --precision int8 does not serve this layer: {NO_FACTORS}",
                hint="use --precision fp16 or bf16 for a GPU, fp32 for a CPU",
            )


def _check_blocks(job: ExportJob) -> None:
    """Raises `LoweringError` where no layer would get INT4: the bundle would be in FP32."""
    precision = job.options.precision
    if precision.name != "int4" or precision.scope == "all":  # other linear layers may get it
        return
    form = precision.quant_format(job.options.target)
    problems = {
        name: not_in_blocks(layer.stored(), form)
        for name, layer in job.model.layers.items()
        if name not in precision.floating
    }
    if problems and all(problems.values()):
        name, problem = next(iter(problems.items()))
        raise LoweringError(
            f"--precision int4: no layer can have it: of layer {name}, {problem}",
            hint="use --precision int8, which takes any width",
        )


def check_table(job: ExportJob, table: CalibrationTable, where: str, loaded: Model) -> None:
    """Raises `CalibrationError` with the reason where a table does not belong to a job.

    A table of more experts than are kept serves: its ranges hold theirs. One of fewer does not,
    since rows that other experts get were never observed. So a table of the model as it was
    `loaded` serves where the job only drops or merges experts, or lets a router choose fewer.
    `where` names the table.
    """
    again = AGAIN.format(path=where)
    edits = job.model.edits
    same = not (edits.ablations or edits.rewrites or edits.steers)
    models = (job.model, loaded) if same else (job.model,)
    if not same and table.origin.model == fingerprint(loaded):
        raise CalibrationError(
            f"{where}: was made from the model without the edits of this export",
            hint="leave --calibration out: with --data the ranges are those of the edited model",
        )
    if table.origin.model not in map(fingerprint, models):
        raise CalibrationError(
            f"{where}: was made from another model, or from this one with other weights, "
            "configuration or edits",
            hint=again,
        )
    if table.origin.renormalize != job.options.renormalize:
        raise CalibrationError(
            f"{where}: was made {renormalised(table.origin)}, this export is not", hint=again
        )
    for layer, k in job.k.items():
        kept = job.model.layers[layer].spec.experts if k is None else k
        observed = table.origin.k.get(layer, 0)
        if observed < kept:
            raise CalibrationError(
                f"{where}: layer {layer} was observed with k = {observed} and the export keeps "
                f"{kept}: what the other experts get was never seen",
                hint=f"{again} --k {kept}",
            )


def fixed_axes(spec: TensorSpec, options: ExportOptions) -> dict[str, int]:
    """Returns the named axes that the options make constants of the graph, with their sizes.

    Raises UsageError for a size that the model does not take, and for one of no axis that it has.
    """
    if options.tokens != DEFAULT_TOKENS and not _TOKEN_AXES.intersection(spec.dynamic_axes):
        raise UsageError(
            f"--tokens {options.tokens}: the model has no token axis: its input '{spec.name}' is "
            f"({', '.join(map(str, spec.shape))})",
            hint="leave --tokens out",
        )
    limits = spec.limits
    for axis, sizes in (("batch", options.batch), ("tokens", options.tokens)):
        # The default range is no wish: a model with fewer positions narrows it.
        default = axis == "tokens" and sizes == DEFAULT_TOKENS
        if sizes.max > limits.get(axis, sizes.max) and not default:
            raise UsageError(
                f"--{axis} {sizes}: the model takes at most {limits[axis]}",
                hint=f"--{axis} 1:{limits[axis]}:{limits[axis]} covers all that it can take",
            )
    # A token count says nothing of an image's height and width: those stay dynamic.
    ranges = {"batch": options.batch, "tokens": options.tokens}
    return {
        axis: ranges[axis].opt
        for axis in spec.dynamic_axes
        if axis in ranges and ranges[axis].fixed
    }
