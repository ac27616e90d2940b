"""The job of an export: its options, resolved for one model before any work begins.

`export_job` creates it once, and refuses whatever can be refused before calibrating, tracing or
writing. Later steps receive the complete job; only `plan.with_trace` may restrict its sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ..common.option import refuse
from ..data.batches import Feed
from ..errors import CalibrationError
from ..graphs.k import parse_k, resolve_k, share_of
from ..graphs.layers.base import MoESpec, moe_layers, sharing_weights
from ..graphs.lowerings.base import AnyPlan, LayerPlan
from ..graphs.names import DOMAIN, PAST
from ..graphs.sizes import (
    BATCH,
    DEFAULT_BATCH,
    DEFAULT_TOKENS,
    PARITY_BATCHES,
    TRACED_BATCH,
    TRACED_SIZES,
    AxisRange,
)
from .bundle.parity import ROUNDED_RTOL
from .bundle.steps import STEPS, Step, requested_steps
from .model import Model, check_one_input, edited, fingerprint
from .options import ExportOptions
from .refusals import check, check_without_model, not_renormalizable
from .requests import CalibrateRequest

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..graphs.precision.types import ComputeTypes
    from .quantization.calibrate import CalibrationJob

PEAK_SAMPLES = 64
"""The number of inputs that show whether FP16 overflows, with `fp16.HEADROOM` to spare."""


@dataclass(frozen=True, slots=True)
class ExportJob:
    """Everything that an export will do.

    `model` includes its edits. `layers` are its layers with their k, not yet planned; `fixed` are
    the sizes of the axes that are constants of the graph. The ranges of tensors are in `table`, or
    `calibration` will find them; without either, none are needed.
    """

    model: Model
    options: ExportOptions
    layers: Mapping[str, AnyPlan]
    fixed: Mapping[str, int]
    table: CalibrationTable | None = None
    calibration: CalibrationJob | None = None

    @property
    def k(self) -> dict[str, int | None]:
        """Each layer's k, None if it is a graph input."""
        return {name: layer.k for name, layer in self.layers.items()}

    @property
    def fixed_batch(self) -> int | None:
        """The batch size if it is a constant of the graph."""
        return self.options.batches.opt if self.options.batches.fixed else None

    @property
    def axis_ranges(self) -> dict[str, AxisRange]:
        """The sizes of dynamic axes that the options set."""
        limits = self.model.limits
        limits |= {axis.split(" + ")[-1]: n for axis, n in limits.items() if " + " in axis}
        return {
            axis: AxisRange(
                *(min(n, limits.get(axis, n)) for n in (sizes.min, sizes.opt, sizes.max))
            )
            for axis, sizes in self.options.ranges.items()
            if axis in self.model.input.dynamic_axes and axis not in self.fixed
        }

    @property
    def groups_of(self) -> int | None:
        """A batch of variable size must be a multiple of this."""
        return self.model.input.groups_of if self.fixed_batch is None else None

    @property
    def fewest_experts(self) -> int:
        """The smallest number of experts in a layer, which bounds a k chosen at run time."""
        return min(layer.spec.experts for layer in self.model.layers.values())

    @property
    def whole_batch(self) -> int | None:
        """The fixed batch size, or the divisor of every valid one; None if any is valid."""
        return self.fixed_batch or self.groups_of

    @property
    def least_batch(self) -> int:
        """The smallest batch that the graph accepts."""
        return self.whole_batch or self.options.batches.min

    @property
    def checked_batch(self) -> int:
        """The batch size of the comparison with PyTorch; it differs from the traced one."""
        return self.fixed_batch or self.options.batches.comparison_size(self.model.batch_of)

    @property
    def largest_batch(self) -> int:
        """The size of the largest batch in which inputs are run."""
        return self.fixed_batch or self.options.batches.largest(self.model.batch_of)

    def probed_batches(self, more: Iterable[int] = ()) -> tuple[int, ...]:
        """Returns the batch sizes at which a graph is compared; empty if the size is fixed."""
        if self.fixed_batch is not None:
            return ()
        multiple = self.model.batch_of
        return self.options.batches.probe_sizes(
            multiple, [*(size * multiple for size in PARITY_BATCHES), *more]
        )

    @property
    def traced_sizes(self) -> dict[str, int]:
        """The sizes of axes in the trace, which are within the requested ranges."""
        sizes = {**TRACED_SIZES, BATCH: TRACED_BATCH * self.model.batch_of}
        return {axis: span.nearest(sizes[axis]) for axis, span in self.axis_ranges.items()}

    @property
    def needs_ranges(self) -> bool:
        """Whether a part is quantised to integers without a scale per row.

        Scales per row are computed while the graph runs.
        """
        if not self.options.ranged:
            return False
        dynamic = all(layer.spec.dynamic_int8 for layer in self.model.layers.values())
        return self.options.quant_format == "qdq" or not dynamic

    @property
    def calibrates(self) -> bool:
        """Whether ranges must be found on the data before planning, because there is no table."""
        options = self.options
        if self.table is not None or options.data is None or not options.finds_ranges:
            return False
        if options.ranged:
            return self.needs_ranges
        # In FP16, the export looks for overflows if a feed has the model's inputs.
        several = any(spec.default is not None for spec in self.model.inputs)
        return not (several and options.precision == "fp16")

    @property
    def writes_text(self) -> bool:
        """Whether its graphs generate text from token ids alone, without an encoder's output."""
        return writes_text(self.model, self.options)

    def layer(self, name: str, tokens: int, *, fixed: bool = False) -> AnyPlan:
        """Returns a layer to plan, without a lowering yet, for inputs with this number of `tokens`.

        With `fixed`, the number is a constant of the network.
        """
        batch = self.options.batches.opt
        return replace(self.layers[name], batch=batch, tokens=tokens, tokens_fixed=fixed)

    def computed_in(self, types: Mapping[str, ComputeTypes]) -> ExportJob:
        """Returns the job with its layers planned in the number types in which they compute."""
        layers = {
            name: replace(
                layer, precision=types[name].precision, precision_reason=types[name].reason
            )
            for name, layer in self.layers.items()
        }
        return replace(self, layers=layers)

    def traced_layers(self, traced: ir.Model) -> tuple[AnyPlan, ...]:
        """Returns the traced layers to plan, without lowerings yet, in the order of execution."""
        layers = {}
        for node in traced.graph:
            if node.domain == DOMAIN:
                x = node.inputs[0]
                size = x.shape[-2] if x is not None and x.shape is not None else None
                tokens = size if isinstance(size, int) else None
                name = node.attributes.get_string("layer")
                if self.layers[name].spec.flat:  # the tokens of the whole batch
                    tokens = _tokens_of_an_input(size, self.options.batches.opt)
                count = self.options.token_counts.opt if tokens is None else tokens
                layers[name] = self.layer(name, count, fixed=tokens is not None)
        return tuple(layers.values())


def layers_to_plan(
    model: Model, k: Mapping[str, int | None], options: ExportOptions
) -> dict[str, AnyPlan]:
    """Returns a model's layers with their k, at the sizes to optimise for, without lowerings yet.

    Their precisions are those of the options.
    """
    batch, tokens = options.batches.opt, options.token_counts.opt
    floats = dict.fromkeys(options.floating, options.float_name)
    return {
        name: LayerPlan(
            layer.spec, k[name], batch, tokens, floats.get(name, options.precision), name=name
        )
        for name, layer in model.layers.items()
    }


def _tokens_of_an_input(size: int | ir.SymbolicDim | None, batch: int) -> int | None:
    """Returns the tokens of one input if a batch has `size` (196, `196*batch`), None if unknown."""
    if isinstance(size, int):
        return max(1, size // batch)
    of_batch = re.fullmatch(r"(?:(\d+)\*)?batch", str(getattr(size, "value", size)))
    return int(of_batch[1] or 1) if of_batch else None


def decodes(model: Model, options: ExportOptions) -> bool:
    """Whether a model's graphs generate text one token at a time, with a cache of earlier ones."""
    cached = any(spec.name.startswith(PAST) for spec in model.inputs)
    fixed = options.token_counts.fixed and "tokens" in model.input.dynamic_axes
    return model.host.per_token and cached and not fixed


def writes_text(model: Model, options: ExportOptions) -> bool:
    """Whether a model's graphs generate text from token ids alone, without an encoder's output."""
    return decodes(model, options) and model.input.name == "input_ids"


def steps_of(model: Model, options: ExportOptions) -> list[Step]:
    """Returns the plugins' parts of an export: those of the model, then those of the options."""
    return [*(STEPS[name] for name in model.host.steps), *requested_steps(options)]


def export_job(
    model: Model | Callable[[], Model], options: ExportOptions | None = None, **more: Any
) -> ExportJob:
    """Returns the job of an export, or raises the reason why it is impossible (`refusals`).

    `model` may be a function that loads it: the checks that need no model come before the call.
    `more` are fields that replace those of `options`.
    """
    options = replace(options or ExportOptions(), **more)
    check_without_model(options)
    table, where = _given_table(options)
    loaded = model if isinstance(model, Model) else model()
    check("model", loaded, options)
    for step in steps_of(loaded, options):
        refuse(step.check(options, loaded))
    options = _with_model_defaults(loaded, options)
    if options.token_counts != DEFAULT_TOKENS and "tokens" not in loaded.input.shape:
        loaded = loaded.host.with_token_axis(loaded, f"--tokens {options.token_counts}")
    changed = edited(loaded, options.edits)
    k = resolve_k(options.kept, changed.specs)
    if isinstance(options.kept, Fraction):
        changed = _with_shares(changed, options.kept)
    changed = changed.host.with_k(changed, k)
    # A token count does not determine an image's height and width, so these stay dynamic.
    fixed = {axis: sizes.opt for axis, sizes in options.ranges.items() if sizes.fixed}
    job = ExportJob(
        model=changed,
        options=options,
        layers=layers_to_plan(changed, k, options),
        fixed={axis: fixed[axis] for axis in loaded.input.dynamic_axes if axis in fixed},
        table=table,
    )
    check("export", job)
    if table is not None:
        check_table(job, table, where, loaded)
    return replace(job, calibration=_calibration_of(job)) if job.calibrates else job


def _with_model_defaults(model: Model, options: ExportOptions) -> ExportOptions:
    """Returns the options with the defaults that depend on the model: the batch and the bounds."""
    images, batch = model.batch_of, options.batches
    if images > 1 and batch == DEFAULT_BATCH:
        options = replace(
            options, batch=AxisRange(images, images, -(-batch.max // images) * images)
        )
    if model.rounded and options.bounded_by_rounding:
        options = replace(options, rtol=ROUNDED_RTOL)
    return options


def _given_table(options: ExportOptions) -> tuple[CalibrationTable | None, str]:
    """Returns the given ranges, read from their file if needed, and their name in messages."""
    table = options.calibration
    if table is None:
        return None, ""
    from ..calibration.table import CalibrationTable  # loaded if one is given

    if isinstance(table, CalibrationTable):
        return table, "the table"
    return CalibrationTable.read(Path(table)), str(table)


def _with_shares(model: Model, share: Fraction) -> Model:
    """Returns the model whose hierarchies keep a share of each level; it shares the weights.

    Returns the model itself if a single k for all levels gives these shares.
    """
    kept: dict[str, tuple[int, ...]] = {}
    for name, layer in model.layers.items():
        shares = tuple(share_of(share, n) for n in layer.spec.levels)
        largest = max(shares, default=1)
        if shares != tuple(min(largest, n) for n in layer.spec.levels):
            kept[name] = shares
    if not kept:
        return model
    module = sharing_weights(model.module)
    for name, layer in moe_layers(module).items():
        if name in kept:
            spec: Any = layer.spec  # kinds with levels have `kept`
            layer.spec = replace(spec, kept=kept[name])
    return replace(model, module=module)


def _calibration_of(job: ExportJob) -> CalibrationJob:
    from ..calibration.methods import DEFAULT_METHOD  # loaded if ranges are found
    from .quantization.calibrate import CalibrationJob

    options = job.options
    assert options.data is not None, "ranges are found on inputs"
    request = CalibrateRequest(
        method=options.method or DEFAULT_METHOD,
        samples=None if options.ranged else PEAK_SAMPLES,
        renormalize=options.renormalize,
    )
    observed = _observed_k(job.k, job.model.specs)
    return CalibrationJob(job.model, options.data, observed, request, job.fixed)


def calibration_job(
    model: Model,
    data: Feed,
    options: CalibrateRequest | None = None,
    *,
    fixed: Mapping[str, int] | None = None,
) -> CalibrationJob:
    """Returns the job of a calibration; raises `UsageError` for options that the model refuses.

    `fixed` are the sizes of axes that are constants of the graph.
    """
    from .quantization.calibrate import CalibrationJob

    options = options or CalibrateRequest()
    check_one_input(model, "calibration", only_optional=True)
    specs = model.specs
    if options.renormalize:
        refuse(not_renormalizable(specs))
    k = resolve_k(parse_k(options.k), specs)
    return CalibrationJob(model, data, _observed_k(k, specs), options, fixed or {})


def _observed_k(k: Mapping[str, int | None], specs: Mapping[str, MoESpec]) -> dict[str, int]:
    """Returns the number of experts to observe: all if k is chosen at run time."""
    return {name: specs[name].experts if kept is None else kept for name, kept in k.items()}


def check_table(job: ExportJob, table: CalibrationTable, where: str, loaded: Model) -> None:
    """Raises `CalibrationError` with the reason if a table does not belong to a job.

    A table may cover more experts than are kept, because its ranges include theirs, but not fewer:
    the rows of other experts were not observed. So a table of the model as it was `loaded` is valid
    if the job only drops or merges experts, or lets a router choose fewer. `where` names the table.
    """
    from .quantization.calibrate import CALIBRATE_AGAIN, renormalize_text

    recalibrate = CALIBRATE_AGAIN.format(path=where)
    edits = job.model.edits
    same = not (edits.ablations or edits.combinations or edits.rewrites or edits.steers)
    models = (job.model, loaded) if same else (job.model,)
    if not same and table.origin.model == fingerprint(loaded):
        raise CalibrationError(
            f"{where} was made from the model without the edits of this export",
            hint="leave --calibration out: --data finds the ranges of the edited model",
        )
    if table.origin.model not in map(fingerprint, models):
        raise CalibrationError(
            f"{where} was made from another model, or from this one with other weights, "
            "configuration or edits",
            hint=recalibrate,
        )
    if table.origin.renormalize != job.options.renormalize:
        raise CalibrationError(
            f"{where} was made {renormalize_text(table.origin)}, unlike this export",
            hint=recalibrate,
        )
    for layer, kept in _observed_k(job.k, job.model.specs).items():
        observed = table.origin.k.get(layer, 0)
        if observed < kept:
            raise CalibrationError(
                f"{where}: layer {layer} was observed with k = {observed}, but the export keeps "
                f"{kept}: the inputs of the other experts were not observed",
                hint=f"{recalibrate} --k {kept}",
            )
