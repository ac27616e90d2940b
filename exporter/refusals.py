"""The checks of an export before it starts: one table, in the order in which they run.

A check yields what is invalid or impossible, before any work begins. Its stage says what it needs:
only the options, the target's features, this machine, the loaded model, or the export as resolved
for that model (`job.ExportJob`).

Only these refusals are elsewhere:

- parsers refuse malformed values (`k.parse_k`, `sizes.parse_range`), and the first check
  calls them; `k.resolve_k`, which computes each layer's k, refuses a k that no layer has;
- records of other calls refuse their own values when they are created (`requests`,
`__post_init__`);
  those of an export cannot, because plugins change them first;
- a plugin's step has its own checks (`bundle.steps.Step`);
- `job.check_table` compares a table of ranges with two models, by hashes of all their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..common.option import Mistake, declared, misfits, refuse
from ..common.registry import left_out
from ..common.text import near_miss
from ..errors import FeedError, LoweringError
from ..graphs.sizes import DEFAULT_BATCH, DEFAULT_TOKENS
from ..graphs.targets import CPU_PROVIDER, TARGETS, Precision
from .bundle.steps import STEPS, Export, requested_steps
from .options import (
    BLOCKED_OPSET,
    CALIBRATED,
    CHOOSERS,
    MAX_OPSET,
    MIN_OPSET,
    TUNE,
    WEIGHT_BITS,
    ExportOptions,
)

if TYPE_CHECKING:
    from ..graphs.layers.base import MoESpec
    from ..graphs.lowerings.base import AnyPlan
    from .model import Model

TOKEN_AXES = frozenset({"tokens", "height", "width"})
"""Axes that `--tokens` sets: for an image it is the number of pixels."""


class ResolvedExport(Export, Protocol):
    """An export that was resolved for its model, as checks see it (`job.ExportJob`)."""

    @property
    def k(self) -> Mapping[str, int | None]: ...
    @property
    def needs_ranges(self) -> bool: ...
    @property
    def calibrates(self) -> bool: ...
    def layer(self, name: str, tokens: int, *, fixed: bool = False) -> AnyPlan: ...


Stage = Literal["options", "target", "machine", "model", "export"]


def with_plugins(options: ExportOptions) -> ExportOptions:
    """Returns the options of an export as changed by the selected plugin steps, and checks both.

    Raises `UsageError` for contradictory options.
    """
    for step in STEPS if options.further else ():
        step.refuses(options)
    check("options", options)
    steps = requested_steps(options)
    for step in steps:
        options = step.change(options)
    for step in steps:
        refuse(step.check(options, None))
    return options


def check_without_model(options: ExportOptions) -> None:
    """Raises the reason why an export is impossible for any model; does not import PyTorch."""
    check("options", options)
    check("target", options)
    check("machine", options)


def check(stage: Stage, *arguments: Any) -> None:
    """Raises the first mistake that a stage's checks of these arguments find.

    A check yields mistakes, or raises an error itself.
    """
    for mistakes in CHECKS[stage]:
        refuse(mistakes(*arguments) or ())


def _check_values(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses values that have the wrong type, cannot be parsed, or are unknown."""
    yield from misfits(
        ExportOptions, {name: getattr(options, name) for name in declared(ExportOptions)}
    )
    _ = options.kept, options.lowerings, options.batches, options.token_counts


def _check_target(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses a target that no installed package provides."""
    if options.target not in TARGETS:
        yield (
            f"--target {options.target}: unknown target",
            near_miss(options.target, TARGETS.names) + left_out(),
        )


def _check_quantisation(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses invalid quantisation options, and those that the precision does not support."""
    share = options.min_retention
    if options.weight_bits not in (None, *WEIGHT_BITS):
        yield (
            f"--weight-bits {options.weight_bits}: INT8 weights have 7 or 8 bits",
            "leave it out: the target's default is exact on every machine",
        )
    if share is not None and not 0 < share <= 1:
        yield (
            f"--min-retention {share:g}: the share must be above 0 and at most 1",
            "--min-retention 0.99 keeps 99% of the accuracy of FP32 at the same k",
        )
    settings = {
        "--quantize": options.quantize != "experts",
        "--rest": options.rest is not None,
        "--weight-bits": options.weight_bits is not None,
        "--min-retention": share is not None,
    }
    also_allowed = {"--quantize": "int4", "--rest": "fp8"}
    if options.keep_floating and not options.integers:
        yield (
            f"keep_floating: with --precision {options.precision} every layer is in floating point",
            "leave keep_floating out, or add --precision int8",
        )
    for option, is_set in settings.items():
        if is_set and options.precision not in ("int8", also_allowed.get(option)):
            yield _not_int8(option, options.precision)


def _not_int8(option: str, precision: Precision) -> Mistake:
    return (
        f"{option} belongs to --precision int8, not to {precision}",
        f"add --precision int8, or leave {option} out",
    )


def _check_graph(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses an opset or lowerings that are invalid or contradict other options."""
    names, opset, target = options.lowerings, options.least_opset, TARGETS[options.target]
    if not MIN_OPSET <= opset <= MAX_OPSET:
        yield (
            f"--opset {opset}: opsets {MIN_OPSET} to {MAX_OPSET} are supported",
            "20 is the first with Gelu; leave --opset out unless a runtime needs another",
        )
    if len(set(names)) < len(names):
        yield f"--lowering {','.join(names)}: a name is repeated", "name each lowering once"
    if MIN_OPSET <= opset < options.needed_opset:
        yield (
            f"--precision int4 for --target {options.target}: ONNX supports weights in blocks from "
            f"opset {BLOCKED_OPSET} on, but the requested opset is {opset}",
            f"leave --opset out to use {BLOCKED_OPSET}, or use --target ort-cpu",
        )
    if TUNE in names and target.compiled:
        yield (
            f"--lowering tune for --target {options.target}: it times graphs in ONNX Runtime, but "
            "this target runs engines",
            "use auto, or name lowerings (--lowering gather,conditional) and compare "
            "their engines on the machine with the GPU: `moexport bench BUNDLE`",
        )
    if TUNE in names and options.precision == "bf16" and target.provider == CPU_PROVIDER:
        yield (
            "--lowering tune: ONNX Runtime's CPU provider has no BF16 kernels to time",
            "use auto, or another --precision",
        )
    if options.kept == "input" and options.min_retention is not None:
        yield (
            "--min-retention with --k input: retention needs one k, but this graph accepts any",
            "give the k that will be used, or leave --min-retention out",
        )


def _check_comparison(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses options of the comparison if nothing is compared, and invalid bounds."""
    samples, atol, rtol = options.verify_samples, options.atol, options.rtol
    if samples is not None and samples < 1:
        yield f"--verify-samples {samples}: must be at least 1", "--no-verify compares nothing"
    if options.threads is not None and options.threads < 1:
        yield (
            f"--threads {options.threads}: must be at least 1",
            "leave it out: the best number is found by measuring",
        )
    for option, value in {"--atol": atol, "--rtol": rtol, "--verify-samples": samples}.items():
        if value is not None and not options.verify:
            yield (
                f"{option} {value} with --no-verify: nothing will be compared",
                "leave one of them out",
            )
    for option, bound in {"--atol": atol, "--rtol": rtol}.items():
        if bound is not None and not 0 <= bound < math.inf:
            yield (
                f"{option} {bound:g}: bounds must be finite and not negative",
                "--rtol 1e-4 allows a difference of 1e-4 · max|y|; --no-verify allows any",
            )


def _check_number_types(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses number types that a target does not support."""
    name, target, floats = options.precision, TARGETS[options.target], options.float_name

    def problem(option: str, reason: str, hint: str) -> Mistake:
        return f"{option} for --target {options.target}: {reason}", hint

    if name in target.refused:
        yield problem(f"--precision {name}", *target.refused[name])
    if options.integers and target.weight_only and options.rest not in (None, target.rest):
        reason = f"integer weights are multiplied in {target.rest.upper()} there"
        yield problem(f"--rest {options.rest}", reason, "leave --rest out")
    if options.integers and not (target.compiled or target.weight_only):
        if options.rest not in (None, "fp32"):
            reason = "integer products return FP32 on a CPU"
            yield problem(f"--rest {options.rest}", reason, "leave --rest out")
        if options.io_precision != "fp32":
            option = f"--io-precision {options.io_precision}"
            reason = "the graph around the integer products is FP32"
            yield problem(option, reason, "leave --io-precision out")
    if options.weight_bits == WEIGHT_BITS[0] and (target.compiled or target.weight_only):
        reason = "its INT8 products are exact with all 8 bits"
        yield problem("--weight-bits 7", reason, "leave --weight-bits out")
    if options.io_precision not in ("fp32", floats):
        yield problem(
            f"--io-precision {options.io_precision}",
            f"the graph computes in {floats}",
            "leave --io-precision out"
            if floats == "fp32"
            else f"use --io-precision fp32 or {floats}",
        )


def _check_inputs(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses options that need inputs or ranges if there are none, or that have no effect."""
    table = options.calibration
    for_target = f" for --target {options.target}" if options.precision == "int8" else ""
    no_ranges = f"--precision {options.precision}{for_target} needs no ranges"
    if options.method is not None and options.in_blocks and for_target:
        yield f"--method {options.method}: {no_ranges}", "leave --method out"
    elif options.method is not None and not options.ranged:
        yield _not_int8("--method", options.precision)
    if options.method is not None and table is not None:
        where = table if isinstance(table, str | Path) else "that was given"
        yield (
            f"--method {options.method}: the ranges are those of the table {where}",
            "leave --method out, or make another table with `moexport calibrate --method`",
        )
    if table is not None and (options.precision not in CALIBRATED or options.in_blocks):
        yield (
            f"--calibration: {no_ranges}",
            "leave --calibration out, or add --precision int8 or fp16",
        )
    if options.data is not None:
        return
    if options.ranged and options.quant_format == "qdq" and table is None:  # for any layer
        yield no_ranges_found(options.precision)
    if options.min_retention is not None:
        yield (
            f"--min-retention {options.min_retention:g}: it is measured on real inputs, but "
            "there are none",
            "give a feed with --data, with labels if there are any",
        )
    if options.verify_samples is not None:
        yield (
            f"--verify-samples {options.verify_samples}: it counts inputs of a feed, but there is "
            "none",
            "give a feed with --data; without one a few random inputs are compared",
        )


def no_ranges_found(precision: Precision) -> Mistake:
    """Returns the error for integers without ranges."""
    return (
        f"--precision {precision}: its ranges need real inputs",
        "give a feed with --data, or a table with --calibration",
    )


def _check_unread(model: Model, options: ExportOptions) -> Iterator[Mistake]:
    """Refuses inputs that nothing reads; a user's own network is checked on them on loading."""
    if options.data is not None and not options.data_reads and not model.host.own_code:
        yield (
            "--data: nothing is calibrated, and --no-verify skips the comparison",
            "leave --data or --no-verify out",
        )


def _check_linears(model: Model, options: ExportOptions) -> Iterator[Mistake]:
    """Refuses `--quantize all` for a model whose only linear layers are its experts."""
    inside = {id(parameter) for layer in model.layers.values() for parameter in layer.parameters()}
    others = any(id(parameter) not in inside for parameter in model.module.parameters())
    if options.quantize == "all" and not others:
        yield (
            "--quantize all: the model has no linear layers outside its MoE layers",
            "leave --quantize out",
        )


def _check_engine_inputs(model: Model, options: ExportOptions) -> Iterator[Mistake]:
    """Refuses an engine for a model with several inputs."""
    if TARGETS[options.target].compiled and len(model.inputs) > 1:
        yield (
            f"--target {options.target}: engines are built from graphs with one input, but this "
            f"model has {len(model.inputs)}",
            "use --target ort-cuda for a GPU, or ort-cpu",
        )


def _check_routing(job: ResolvedExport) -> Iterator[Mistake]:
    """Refuses `--expose-routing` if no layer chooses experts."""
    shown = job.options.shown_routing
    specs = {name: spec for name, spec in job.model.specs.items() if spec.levels}
    if shown == "chosen":
        specs = {n: s for n, s in specs.items() if s.rewritable or s.drops or job.k[n] != s.experts}
    if shown is not None and not specs:
        more = ", choose a k below n, or use --expose-routing=scores" if shown == "chosen" else ""
        yield (
            "--expose-routing: every layer computes all of its experts, so there is no routing "
            "to expose",
            f"leave --expose-routing out{more}",
        )


def _check_layer_names(job: ResolvedExport) -> Iterator[Mistake]:
    """Refuses names of layers that the model does not have."""
    options = job.options
    named = {"keep_floating": options.keep_floating, "layer_lowerings": options.layer_lowerings}
    for option, names in named.items():
        for name in names:
            if name not in job.model.layers:
                hint = near_miss(name, job.model.layers)
                yield f"{option}: no MoE layer is called '{name}'", hint


def _check_rereading(options: ExportOptions) -> Iterator[Mistake]:
    """Refuses a feed that can be read only once, if the export reads it several times."""
    if isinstance(options.data, Iterator) and options.data_reads > 1:
        yield FeedError(
            f"--data: the feed is a {type(options.data).__name__}, which can be read only once, "
            f"but this export reads it {options.data_reads} times",
            hint="give a list, an array, a file, or an iterable that starts again each time",
        )


def _check_engine(options: ExportOptions) -> None:
    """Refuses a requested engine that cannot be built here."""
    if options.engine is not None and options.engine is not False:
        from .tensorrt.engines import check_for_export

        check_for_export(options.target, options.engine)


def _check_machine(options: ExportOptions) -> None:
    """Refuses a precision that this machine cannot compute, if graphs are compared."""
    from .bundle.runtimes import check_computes

    if options.verify:
        check_computes(options.precision, options.target)


def _check_destination(options: ExportOptions) -> None:
    """Refuses a folder that cannot be written or must not be replaced."""
    from .bundle.destination import check_destination

    if options.destination is not None:
        check_destination(options.destination, force=options.force)


def _check_groups(model: Model, options: ExportOptions) -> Iterator[Mistake]:
    """Refuses batch sizes that are not multiples of the number of inputs computed together."""
    group, batch = model.batch_of, options.batches
    if batch != DEFAULT_BATCH and any(n % group for n in (batch.min, batch.opt, batch.max)):
        yield (
            f"--batch {batch}: the model routes the tokens of {group} inputs together",
            f"--batch {group}:{group}:{4 * group}, or other multiples of {group}; a "
            "model with a smaller group_size, or no capacity_factor, routes each input alone",
        )


def _check_retention(model: Model, options: ExportOptions) -> None:
    """Refuses `--min-retention` for a model with several inputs."""
    from .model import check_one_input  # loads PyTorch

    if options.min_retention is not None:
        check_one_input(model, "--min-retention")


def _check_axes(job: ResolvedExport) -> Iterator[Mistake]:
    """Refuses token counts for a model without a token axis, and sizes that it does not accept."""
    spec, options = job.model.input, job.options
    if options.token_counts != DEFAULT_TOKENS and not TOKEN_AXES.intersection(spec.dynamic_axes):
        yield (
            f"--tokens {options.token_counts}: the model has no token axis: its input "
            f"'{spec.name}' is ({', '.join(map(str, spec.shape))})",
            "leave --tokens out",
        )
    for axis, sizes in options.ranges.items():
        # The default range is not a request: a model with fewer positions narrows it.
        default = axis == "tokens" and sizes == DEFAULT_TOKENS
        limit = spec.limits.get(axis, sizes.max)
        if sizes.max > limit and not default:
            yield (
                f"--{axis} {sizes}: the model accepts at most {limit}",
                f"--{axis} 1:{limit}:{limit} covers all sizes",
            )


def not_renormalizable(specs: Mapping[str, MoESpec]) -> Iterator[Mistake]:
    """Yields a mistake for each layer whose coefficients cannot be renormalised."""
    from ..graphs.layers.base import kind_text  # loads PyTorch

    for spec in specs.values():
        if not spec.renormalizable:
            yield (
                f"--renormalize: layer {spec.name} is {kind_text(spec.kind)}, whose coefficients "
                "cannot be renormalised",
                "leave --renormalize out",
            )


def _check_lowerings(job: ResolvedExport) -> None:
    """Refuses a lowering that does not support a layer."""
    from ..graphs.lowerings.choice import check as check_lowering  # loads PyTorch

    options = job.options
    for name in job.model.layers:
        plan = job.layer(name, options.token_counts.opt)
        chosen = options.layer_lowerings.get(name)
        for lowering in options.lowerings if chosen is None else (chosen[0],):
            if lowering not in CHOOSERS:
                check_lowering(lowering, plan, options.target)


def _check_stored_integers(job: ResolvedExport) -> Iterator[Mistake]:
    """Refuses a layer whose weights an integer precision does not support."""
    from ..graphs.names import operand_of

    options = job.options
    for name, layer in job.model.layers.items():
        quantised = options.ranged and name not in options.floating
        if options.in_blocks and not any(
            part.name.startswith("experts.") for part in layer.stored()
        ):
            other = "fp16" if TARGETS[options.target].weight_only else "int8 or fp32"
            yield LoweringError(
                f"layer {name}: --precision {options.precision} does not support this layer: "
                "it has no matrices of experts to quantise in blocks",
                hint=f"use --precision {other}",
            )
        if quantised and not any(operand_of(part.name) for part in layer.stored()):
            yield LoweringError(
                f"layer {name}: --precision int8 does not support this layer: its weight tensor is "
                "not factorised, but only factors can be quantised",
                hint="use --precision fp16 or bf16 for a GPU, fp32 for a CPU",
            )


def _check_blocks(job: ResolvedExport) -> Iterator[Mistake]:
    """Refuses weights in blocks if no layer supports them: all would stay floats."""
    from ..graphs.precision.weights import not_in_blocks

    options = job.options
    if not options.in_blocks or options.quantize == "all":  # other linear layers may have them
        return
    problems = {
        name: not_in_blocks(layer.stored(), options.quant_format)
        for name, layer in job.model.layers.items()
        if name not in options.floating
    }
    if problems and all(problems.values()):
        name, problem = next(iter(problems.items()))
        yield LoweringError(
            f"--precision {options.precision}: no layer supports it: for layer {name}, {problem}",
            hint="use --precision fp16"
            if TARGETS[options.target].weight_only
            else "use --precision int8, which supports any width",
        )


def _check_calibration(job: ResolvedExport) -> Iterable[Mistake]:
    """Refuses ranges that need inputs if there are none, and models that cannot be calibrated."""
    from .model import check_one_input  # loads PyTorch

    options = job.options
    if job.calibrates:
        what = "--quantize all" if options.quantize == "all" else "--data"
        check_one_input(job.model, what, only_optional=True)
    elif job.needs_ranges and options.data is None and options.calibration is None:
        yield no_ranges_found(options.precision)


CHECKS: Mapping[Stage, Sequence[Callable[..., Iterable[Mistake] | None]]] = {
    "options": (_check_values, _check_quantisation, _check_target, _check_graph, _check_comparison),
    "target": (_check_number_types, _check_inputs, _check_rereading),
    "machine": (_check_engine, _check_machine, _check_destination),
    "model": (_check_unread, _check_linears, _check_engine_inputs, _check_groups, _check_retention),
    "export": (
        _check_axes,
        _check_routing,
        _check_layer_names,
        lambda job: not_renormalizable(job.model.specs) if job.options.renormalize else (),
        _check_lowerings,
        _check_stored_integers,
        _check_blocks,
        _check_calibration,
    ),
}
"""Every check of an export, by its stage."""
