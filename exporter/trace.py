"""Traces a model to a traced graph: standard ops, and one `ai.moexport` node for each MoE layer.

The experts' weights are not part of the trace. Each node names its layer, and the lowering uses
the weights in place, so that tracing neither copies nor reads them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import logging
import math
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from itertools import chain, islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.function_libs.torch_lib.ops import nn as torchlib
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.printers import PythonPrinter

from ..common.libraries import min_size, older_tracer
from ..errors import MoexportError, TraceError, is_out_of_memory
from ..graphs.layers.base import MoELayer, moe_layers, replaced_layers
from ..graphs.lower import simplify
from ..graphs.names import DOMAIN
from ..graphs.sizes import BATCH, TRACED_BATCH, TRACED_SIZES
from .model import Model, Steered

RANK = 4  # [b, heads, m, d / heads]


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Computes softmax(q·kᵀ·scale)·v in five nodes; masks and grouped heads use PyTorch's nodes."""
    plain = attn_mask is None and not is_causal and not enable_gqa
    if not plain or query.shape is None or len(query.shape) != RANK:
        return torchlib.aten_scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scaled = op.Mul(query, op.Constant(value_float=factor))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def stable_sort(
    values: Any, stable: bool = True, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    """Sorts by a `TopK` of all values, which keeps equal values in their order."""
    shape: Any = op.Shape(values)
    axis: Any = op.Constant(value_ints=[dim])
    size: Any = op.Gather(shape, axis)
    return op.TopK(values, size, axis=dim, largest=int(descending))


def squeeze(values: Any, dim: int) -> Any:
    """Removes an axis if its size is 1, as in PyTorch."""
    size = None if values.shape is None or not len(values.shape) else values.shape[dim]
    if isinstance(size, int) and size != 1:
        return op.Identity(values)
    return core.aten_squeeze_dim(values, dim)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.squeeze.dim: squeeze,
    torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    torch.ops.aten.sort.stable: stable_sort,
}


class BagsAsRows(TorchFunctionMode):
    """Within the block, PyTorch's `embedding_bag` looks up bags of equal size as rows.

    PyTorch's own translation is a loop over the bags.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.embedding_bag:
            given = signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            bags = given.arguments
            if bags["input"].ndim == 2 and bags["offsets"] is None and bags["max_norm"] is None:
                return _reduced_rows(
                    bags["input"],
                    bags["weight"],
                    bags["mode"],
                    bags["per_sample_weights"],
                    bags["padding_idx"],
                )
        return func(*args, **(kwargs or {}))


def _reduced_rows(
    indices: Tensor, weight: Tensor, mode: str, scales: Tensor | None, padding: int | None
) -> Tensor:
    """Returns the rows of bags [b, m], looked up and reduced to [b, d]."""
    rows = nn.functional.embedding(indices, weight)  # [b, m, d]
    if scales is not None:
        rows = rows * scales[..., None]
    if padding is None:
        if mode == "max":
            return rows.amax(dim=1)
        return rows.sum(dim=1) if mode == "sum" else rows.mean(dim=1)
    counts = (indices != padding % len(weight))[..., None]
    if mode == "max":
        highest = rows.masked_fill(~counts, -torch.inf).amax(dim=1)
        return highest.masked_fill(~counts.any(dim=1), 0.0)
    total = (rows * counts).sum(dim=1)
    return total if mode == "sum" else total / counts.sum(dim=1).clamp(min=1)


CAUSAL = {nn.TransformerEncoder: "is_causal", nn.TransformerDecoder: "tgt_is_causal"}
"""The argument that tells a module that its mask is causal."""


@contextlib.contextmanager
def _masks_by_flag(network: nn.Module) -> Iterator[None]:
    """Within the block, PyTorch's Transformers treat a mask as causal only by `is_causal`.

    By default they compare its values with a causal mask, which cannot be traced.
    """

    def hook(name: str, module: nn.Module, args: Any, named: Any) -> tuple[Any, Any]:
        given = signature(module.forward).bind(*args, **named)
        if name in given.signature.parameters:
            given.arguments[name] = given.arguments.get(name) is True
        return given.args, given.kwargs

    with contextlib.ExitStack() as hooks:
        for module in network.modules():
            for kind, name in CAUSAL.items():
                if isinstance(module, kind):
                    add = module.register_forward_pre_hook
                    hooks.callback(add(partial(hook, name), with_kwargs=True).remove)
        yield


_SCOPES = "pkg.torch.onnx.name_scopes"


def name_nodes(graph: ir.Graph) -> None:
    """Renames every node to `MODULE/OP` in place; adds a number to repeated names."""
    taken: set[str] = set()
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        # The last scope is the op itself, the one before it the module that called it.
        base = f"{scopes[-2]}/{node.op_type}".lstrip("/") if len(scopes) > 1 else node.op_type
        name, count = base, 2
        while name in taken:
            name, count = f"{base}.{count}", count + 1
        taken.add(name)
        node.name = name


NOISY_LOGGERS = ("torch.onnx", "torch.fx.experimental.symbolic_shapes")
LINE = re.compile(r'call raised this error:\n  File "([^"]+)", line (\d+), in .*\n +(.+)')
"""The line of the user's code at which PyTorch failed, in its message."""


class _StandIn(nn.Module):
    """Stands in for a MoE layer while tracing: one node with the layer's name."""

    def __init__(self, name: str, layer: MoELayer) -> None:
        super().__init__()
        self.layer = name
        self.op_type = layer.spec.op_type
        self.out = layer.spec.out
        self.tokens = layer.tokens  # a bound method, so that the layer does not become a submodule

    def forward(self, x: Tensor, *routed: Tensor) -> Tensor:
        x = self.tokens(x)
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{self.op_type}",
            [x, *routed],
            {"layer": self.layer},
            dtype=x.dtype,
            shape=[*x.shape[:-1], self.out],
            version=1,
        )


@dataclass(frozen=True, slots=True)
class ValidSizes:
    """The sizes of its axes for which a trace is valid, as PyTorch's tracer reports them.

    `bounds` are the smallest and the largest size of an axis, None if unlimited. A `guard` is a
    comparison of sizes that was made while tracing, as code in terms of axes. For sizes at which
    its result differs, the network may take a different code path, although usually only the memory
    layout of its tensors differs. `traced` are the sizes of the trace.
    """

    bounds: Mapping[str, tuple[int, int | None]]
    guards: Sequence[CodeType]
    traced: Mapping[str, int]

    def between(self, axis: str) -> tuple[int, int | None]:
        """Returns the smallest and the largest valid size of an axis; None: no limit."""
        return self.bounds.get(axis, (1, None))

    def changes(self, axis: str, smallest: int, largest: int) -> tuple[int, ...]:
        """Returns the sizes from `smallest` to `largest` at which a guard's result first changes.

        For each guard, there is at most one below the traced size and one above it. A size of 1 is
        never included: every network has guards against it.
        """
        traced, found = self.traced[axis], set[int]()
        up, down = range(traced + 1, largest + 1), range(traced - 1, max(smallest, 2) - 1, -1)
        for guard in self.guards:
            if axis not in guard.co_names:
                continue
            for sizes in (up, down):
                found.update(islice((n for n in sizes if not self._is_met(guard, axis, n)), 1))
        return tuple(sorted(found))

    def _is_met(self, guard: CodeType, axis: str, size: int) -> bool:
        try:
            return bool(eval(guard, {"math": math, "torch": torch}, {**self.traced, axis: size}))
        except ArithmeticError:  # the guard divides by a size
            return True


VALID_SIZES = "moexport.valid_sizes"
"""The key of a trace's valid sizes in its `meta`."""


def valid_sizes(traced: ir.Model) -> ValidSizes:
    """Returns the sizes for which a trace is valid; without a record, all sizes."""
    found: ValidSizes = traced.meta.get(VALID_SIZES, ValidSizes({}, (), {}))
    return found


PROGRAM = "moexport.program"
"""The key of PyTorch's program in the `meta` of a graph that a host traced."""


def trace(
    model: Model,
    *,
    opset: int = 20,
    fixed: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> ir.Model:
    """Returns the traced graph of a model, with every named axis of its inputs dynamic.

    `fixed` has the sizes of axes that become constants instead, and `sizes` those of other axes
    in the trace. The sizes for which the graph is valid are in its `meta` (`VALID_SIZES`). Raises
    `TraceError` if the backbone cannot be traced.
    """
    fixed = fixed or {}
    if isinstance(model.module, Steered):  # layers get strengths when they are lowered
        model = replace(model, module=model.module.network, inputs=model.inputs[:-1])
    sizes = traced_sizes(model, {**(sizes or {}), **fixed})
    with layers_as_nodes(model.module) as backbone, _quiet():
        try:
            graph = model.host.traced(backbone, model, sizes, fixed, opset=opset)
            if graph is None:
                graph = _program(backbone, model, sizes, fixed, opset=opset)
        except torch.onnx.errors.OnnxExporterError as error:
            cause = error.__cause__ or error
            if is_out_of_memory(cause):  # not a problem of the network
                # A new error, because one that is chained to itself would loop.
                raise MemoryError(str(cause)) from None
            if isinstance(cause, MoexportError):  # from code around the user's
                raise type(cause)(cause.message, hint=cause.hint) from error
            reason, hint = _reason(cause)
            line = LINE.search(str(cause))
            where = f" ({Path(line[1]).name}, line {line[2]}: {line[3]})" if line else ""
            raise TraceError(
                f"PyTorch cannot trace this {model.family} model: {reason}{where}",
                hint=older_tracer() or f"{hint}--verbose shows PyTorch's own report",
            ) from error
    name_nodes(graph.graph)
    simplify(graph)
    _check_calls(graph, moe_layers(model.module))
    program = graph.meta.pop(PROGRAM, None)
    if program is not None:
        graph.meta[VALID_SIZES] = _valid_sizes(program, model, sizes, fixed)
    return graph


def _valid_sizes(
    program: torch.export.ExportedProgram,
    model: Model,
    traced: Mapping[str, int],
    fixed: Mapping[str, int],
) -> ValidSizes:
    """Returns the sizes for which a PyTorch program is valid."""
    users = set(program.graph_signature.user_inputs)
    values = [node.meta.get("val") for node in program.graph.nodes if node.name in users]
    symbols: dict[str, Any] = {}
    bounds: dict[str, tuple[int, int | None]] = {}
    environment = None
    for value, spec in zip(
        (value for value in values if isinstance(value, Tensor)), model.inputs, strict=False
    ):
        sizes: Iterable[Any] = value.shape  # PyTorch's types do not include symbols
        for size, axis in zip(sizes, spec.shape, strict=False):
            if not isinstance(size, torch.SymInt) or not isinstance(axis, str) or axis in fixed:
                continue
            environment, expression = size.node.shape_env, size.node.expr
            (symbol,) = expression.free_symbols if len(expression.free_symbols) == 1 else (None,)
            factor: Any = None if symbol is None else expression.coeff(symbol)
            if symbol is None or expression != factor * symbol or axis not in traced:
                continue  # a sum of axes of other inputs
            symbols[str(symbol)] = axis, int(factor)
            ranges = environment.var_to_range[symbol]
            # PyTorch's bounds exclude a size of 1, or one group; graphs are compared at these.
            least, high = int(ranges.lower), None
            low = 1 if least <= TRACED_BATCH else least * int(factor)
            if ranges.upper.is_integer and ranges.upper < sys.maxsize - 1:
                high = int(ranges.upper) * int(factor)
            previous = bounds.get(axis, (1, None))
            bounds[axis] = (
                max(low, previous[0]),
                min((limit for limit in (high, previous[1]) if limit is not None), default=None),
            )
    guards = () if environment is None else _guards(environment, symbols)
    return ValidSizes(bounds=bounds, guards=guards, traced=dict(traced))


def _guards(environment: Any, symbols: Mapping[str, tuple[str, int]]) -> tuple[CodeType, ...]:
    """Returns the comparisons that the tracer made, in terms of axes; others are left out."""
    by_code: dict[str, CodeType] = {}
    deferred = environment.deferred_runtime_asserts.values()
    for guard in (*environment.guards, *chain.from_iterable(deferred)):
        if not {str(symbol) for symbol in guard.expr.free_symbols} <= symbols.keys():
            continue
        code = PythonPrinter().doprint(guard.expr)
        for symbol, (axis, factor) in symbols.items():
            size = axis if factor == 1 else f"({axis} // {factor})"
            code = re.sub(rf"\b{symbol}\b", size, code)
        if code not in by_code:
            with contextlib.suppress(SyntaxError):  # not a comparison of numbers
                by_code[code] = compile(code, "guard", "eval")
    return tuple(by_code.values())


def _reason(cause: BaseException) -> tuple[str, str]:
    """Returns the reason why PyTorch could not trace a network, and the start of any hint.

    The first error has the reason; the errors chained to it name only the step.
    """
    chain = [cause]
    while (before := chain[-1].__cause__) is not None:
        chain.append(before)
    first = chain[-1]
    lines = (line.strip() for line in str(first).splitlines())
    reason = next((line for line in lines if line), type(first).__name__)
    for error in chain:
        if type(error).__name__ != "DispatchError":  # PyTorch's exporter wraps the reason in it
            continue
        frames = traceback.walk_tb(error.__traceback__)
        nodes = (frame.f_locals.get("node") for frame, _ in frames)
        node = next((node for node in nodes if isinstance(node, torch.fx.Node)), None)
        if node is None:
            return reason, ""
        modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
        where = f" in {modules[-1]}" if modules else ""
        hint = "write it with other operators, or leave that part out of the network; "
        return f"the operator {node.target}{where} has no ONNX equivalent", hint
    text = f"{type(first).__name__}: {first}"
    if "DataDependent" in text or "data-dependent" in text:
        reason = "a branch of its forward, or a size, depends on the values of its inputs"
        return reason, "torch.where(condition, a, b) computes both branches; "
    # PyTorch fails to write its message if the size in it is not a whole number.
    limit = re.search(r"Expected op to be '==', got \S+ for (.+)", text)
    if limit is not None:
        reason = f"its computation depends on its sizes: the trace is valid for {limit[1]}"
    if "Constraints violated" in text or limit is not None:
        return reason, "--batch N exports for that size only; "
    return reason, ""


def traced_sizes(model: Model, fixed: Mapping[str, int]) -> dict[str, int]:
    """Returns the size of every named axis of a model's inputs while it is traced."""
    axes = dict.fromkeys(
        axis for spec in model.inputs for size in spec.dynamic_axes for axis in size.split(" + ")
    )
    traced = {**TRACED_SIZES, BATCH: TRACED_BATCH * model.batch_of}
    sizes = {axis: fixed.get(axis, traced.get(axis, TRACED_BATCH)) for axis in axes}
    return {axis: min(size, model.limits.get(axis, size)) for axis, size in sizes.items()}


def _program(
    backbone: nn.Module,
    model: Model,
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
    *,
    opset: int,
) -> ir.Model:
    """Returns the graph that PyTorch's exporter makes of a network."""
    examples = model.zeros(sizes)
    # Equal names are one axis, wherever they occur.
    axes = {
        axis: torch.export.Dim(axis, min=min_size(size), max=model.limits.get(axis))
        for axis, size in sizes.items()
    }
    if model.batch_of > 1 and BATCH not in fixed:
        axes[BATCH] = model.batch_of * torch.export.Dim(GROUPS, min=1)
    dynamic = tuple(
        {
            index: axes[axis]
            for index, axis in enumerate(spec.shape)
            if isinstance(axis, str) and axis not in fixed
        }
        for spec in model.inputs
    )
    kinds = [parameter.kind for parameter in signature(backbone.forward).parameters.values()]
    variadic = kinds.index(Parameter.VAR_POSITIONAL) if Parameter.VAR_POSITIONAL in kinds else None
    nested: tuple[Any, ...] = dynamic  # the tracer passes all of `*past` as one argument
    if variadic is not None and variadic < len(dynamic):
        nested = (*dynamic[:variadic], dynamic[variadic:])
    with BagsAsRows(), _masks_by_flag(backbone):
        program = torch.onnx.export(
            backbone,
            examples,
            dynamo=True,
            opset_version=opset,
            input_names=[spec.name for spec in model.inputs],
            output_names=[spec.name for spec in model.outputs],
            dynamic_shapes=nested,
            custom_translation_table=TRANSLATIONS,
            optimize=False,
            verbose=False,
        )
        assert program is not None
        optimise(program.model, program.exported_program)
        _check_dynamic(
            program.model, dynamic, model, lambda: _line_with_number(backbone, examples, nested)
        )
    if model.batch_of > 1:
        _name_batch(program.model, model.batch_of)
    program.model.meta[PROGRAM] = program.exported_program
    return program.model


def optimise(model: ir.Model, program: torch.export.ExportedProgram | None) -> None:
    """Optimises a graph like PyTorch's exporter, but keeps numbers close to 0 and 1.

    onnxscript's rules replace x + 1e-8 and x · 1.000005 by x, which divides by zero if 1e-8 is the
    epsilon of a norm. While the rules run, such numbers are inputs of the graph.
    """
    graph = model.graph
    numbers: list[tuple[ir.Value, ir.TensorProtocol]] = []
    for name, value in [*graph.initializers.items()]:
        if (number := value.const_value) is not None and _nearly_neutral(number):
            del graph.initializers[name]
            numbers.append((value, number))
    for node in [*graph.all_nodes()]:
        number = ir.convenience.get_const_tensor(node.outputs[0])
        if node.op_type == "Constant" and number is not None and _nearly_neutral(number):
            value = ir.val(node.outputs[0].name, number.dtype, ())
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            numbers.append((value, number))
    for value, _ in numbers:
        value.const_value = None
        graph.inputs.append(value)
    torch.onnx.ONNXProgram(model, program).optimize()  # in place
    for value, number in numbers:
        graph.inputs.remove(value)
        value.const_value = number
        graph.register_initializer(value)


def _nearly_neutral(number: ir.TensorProtocol) -> bool:
    """Whether onnxscript's rules (`math.isclose`) treat a number as 0 or 1, and it is neither."""
    if number.shape.rank() or not number.dtype.is_floating_point():
        return False
    x = number.numpy().item()
    return any(x != y and math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-8) for y in (0.0, 1.0))


GROUPS = "groups"
PYTORCH = str(Path(torch.__file__).parent)


def _line_with_number(backbone: nn.Module, examples: tuple[Tensor, ...], shapes: Any) -> str:
    """Returns the line of a network's code that turns a symbolic size into a number.

    It traces the network again and watches the calls, which takes several times longer.
    """
    conversions = {torch.SymInt.__int__.__code__, torch.SymInt.__index__.__code__}
    lines: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code not in conversions or lines:
            return
        if frame.f_locals["self"].node.maybe_as_int() is None:
            frames = (f for f, _ in traceback.walk_stack(frame.f_back))
            user_frame = next(
                (f for f in frames if not f.f_code.co_filename.startswith((PYTORCH, "<"))), None
            )
            if user_frame is not None:
                file, line = user_frame.f_code.co_filename, user_frame.f_lineno
                code = linecache.getline(file, line).strip()
                lines.append(f" ({Path(file).name}, line {line}: {code})")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with contextlib.suppress(Exception):  # PyTorch reports the constant as an error
            torch.export.export(backbone, examples, dynamic_shapes=shapes, strict=False)
    finally:
        sys.setprofile(before)
    return "".join(lines)


def _check_dynamic(
    traced: ir.Model, dynamic: Sequence[Mapping[int, object]], model: Model, line: Callable[[], str]
) -> None:
    """Raises TraceError if the network turned a dynamic axis into a constant."""
    for value, spec, axes in zip(traced.graph.inputs, model.inputs, dynamic, strict=True):
        sizes = () if value.shape is None else value.shape.dims
        for axis in axes:
            if axis < len(sizes) and isinstance(sizes[axis], int):
                of_batch = spec.shape[axis] == BATCH
                raise TraceError(
                    f"the network uses the {spec.shape[axis]} of its {spec.name} as a number "
                    f"({sizes[axis]} while it is traced), so the graph would run for that size "
                    f"alone{line()}",
                    hint=f"use x.shape[{axis}] directly: no len(x), no int(…) and no loop over it"
                    + ("; or export for one size with --batch N" if of_batch else ""),
                )


def _name_batch(traced: ir.Model, group_size: int) -> None:
    """Expresses sizes that are a multiple of the number of groups in terms of the batch.

    After a Reshape, the groups have a symbol of PyTorch's own; no other axis varies.
    """
    values = (value for node in traced.graph for value in node.outputs)
    for value in (*values, *traced.graph.inputs, *traced.graph.outputs):
        if value.shape is None:
            continue
        sizes: list[int | str | None] = []
        for size in value.shape:
            text = str(size.value) if isinstance(size, ir.SymbolicDim) else ""
            match = re.fullmatch(rf"(\d+)\*({GROUPS}|s\d+)|{GROUPS}\*(\d+)", text)
            factor = int(match[1] or match[3]) if match else 0
            if factor and factor % group_size == 0:
                sizes.append(BATCH if factor == group_size else f"{factor // group_size}*{BATCH}")
            else:
                sizes.append(size.value if isinstance(size, ir.SymbolicDim) else size)
        value.shape = ir.Shape(sizes)


def _check_calls(graph: ir.Model, layers: Iterable[str]) -> None:
    """Raises TraceError unless each layer is one node: its name identifies values and choices."""
    calls = Counter(
        node.attributes.get_string("layer") for node in graph.graph if node.domain == DOMAIN
    )
    names = ", ".join(layers)
    if names and not calls:
        raise TraceError(
            f"no output of the network depends on its MoE layers ({names})",
            hint="return a result that is computed with them",
        )
    for layer, count in calls.items():
        if count > 1:
            raise TraceError(
                f"the layer {layer} is called {count} times in one forward pass",
                hint="give each call its own layer (copy.deepcopy keeps the weights)",
            )


@contextlib.contextmanager
def layers_as_nodes(module: nn.Module) -> Iterator[nn.Module]:
    """Replaces every MoE layer by a one-node stand-in within the block."""
    if "" in moe_layers(module):
        raise TraceError("the model is a bare MoE layer; wrap it in a module that calls it")
    with replaced_layers(module, _StandIn) as backbone:
        yield backbone


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the exporter's own notices (torchvision is absent, …) from the terminal."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        # The exporter prints its steps to stdout, which is for results only, and graphs that it
        # cannot trace to stderr.
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
