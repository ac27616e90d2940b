"""Traces a `transformers` model with the library's exporter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any

import onnx_ir as ir
import torch

from ...common.libraries import CACHES, graph_of
from ...errors import MissingExtraError, TraceError, install
from ...exporter.model import TensorSpec
from ...exporter.trace import PROGRAM, optimise
from ...graphs.names import PAST, PRESENT
from .network import ENCODED, ENCODED_MASK, TransformersNetwork

_SYMBOL = re.compile(r"[a-z]\d+")


def traced_program(
    network: TransformersNetwork,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    fixed: Mapping[str, int],
    *,
    opset: int,
) -> ir.Model:
    """Returns a network's graph, with the names and axes of its inputs and outputs.

    The network is traced at `sizes`; axes in `fixed` are constants of the graph. Raises
    `TraceError` if an axis that should vary became a constant, or would become one.
    """
    try:
        from transformers.exporters.exporter_dynamo import DynamoExporter
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    except ImportError as error:
        raise _no_exporter(error) from error
    if network.loops and "tokens" not in fixed:
        raise TraceError(
            f"a {type(network.wrapped).__name__} loops over its tokens, and a graph repeats the "
            "loop for the number of tokens that was traced",
            hint="--tokens N exports the model for inputs of exactly N tokens",
        )
    tensors = [_example(spec, sizes) for spec in inputs]
    arguments = network.arguments(tensors)
    axes = [
        {
            at: torch.export.Dim.AUTO
            for at, size in enumerate(spec.shape)
            if isinstance(size, str) and size not in fixed
        }
        for spec in inputs
    ]
    shapes = _shapes(network, arguments, axes)
    config = OnnxConfig(dynamic=True, opset_version=opset, dynamic_shapes=shapes, optimize=False)
    try:
        # Without a cache the outputs at padding are compared, although they do not matter.
        with _windows_of_tokens() if network.cached else nullcontext():
            exporter = _recording_programs(OnnxExporter, DynamoExporter)
            exported = exporter.export(network.wrapped, arguments, config=config)
    except ImportError as error:  # the exporter requires specific versions
        raise _no_exporter(error) from error
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        cause = error.__cause__ or error
        raise TraceError(
            f"transformers cannot trace this {type(network.wrapped).__name__}: "
            f"{(str(cause).strip().splitlines() or [type(cause).__name__])[0]}",
            hint="the library's exporter to ONNX is experimental and does not support every "
            "architecture; --verbose shows its report",
        ) from error
    graph = graph_of(exported)
    assert isinstance(graph, ir.Model)
    before_5_23 = hasattr(exported, "exported_program")
    program = exported.exported_program if before_5_23 else exporter.programs[-1]
    optimise(graph, program)
    graph.meta[PROGRAM] = program
    _set_names(graph, inputs, outputs, fixed)
    return graph


def _recording_programs(exporter: Any, tracer: Any) -> Any:
    """Returns an exporter of transformers that records the programs its tracer makes."""

    class Tracer(tracer):  # type: ignore[misc]
        """Records its programs, because from 5.23 on the exporter returns only the graph."""

        def export_program(self, *arguments: Any, **named: Any) -> Any:
            result = super().export_program(*arguments, **named)
            self.programs = [result[0]]
            return result

    class Exporter(exporter, Tracer):  # type: ignore[misc]
        """Calls the tracer above as its `super()`."""

    return Exporter()


def _no_exporter(error: ImportError) -> MissingExtraError:
    return MissingExtraError(
        f"the exporter to ONNX of transformers {metadata.version('transformers')}, which traces "
        f"this model, cannot be used: {error}",
        hint=f"{install('transformers')}; its exporter needs PyTorch 2.11 or newer",
    )


@contextmanager
def _windows_of_tokens() -> Iterator[None]:
    """Within the context, a sliding window counts only tokens that the mask does not exclude.

    The library counts positions in the cache. The result is the same if padding comes before all
    tokens, but padding on the right of a prompt stays between it and the generated tokens.
    """
    from transformers import masking_utils

    counts: list[torch.Tensor | None] = [None]

    def prepare_and_count(*arguments: Any, **named: Any) -> Any:
        inputs = prepare(*arguments, **named)
        mask = inputs[1]
        counts[0] = (
            mask.cumsum(dim=-1) if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        )
        return inputs

    def overlay(window: int) -> Any:
        count = counts[0]
        if count is None:
            return original_overlay(window)
        return lambda row, _, query, key: count[row, key] > count[row, query] - window

    prepare = masking_utils._preprocess_mask_arguments
    original_overlay = masking_utils.sliding_window_overlay
    masking_utils._preprocess_mask_arguments = prepare_and_count
    masking_utils.sliding_window_overlay = overlay
    try:
        yield
    finally:
        masking_utils._preprocess_mask_arguments = prepare
        masking_utils.sliding_window_overlay = original_overlay


def _example(spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = spec.concrete(sizes)
    if spec.default == "ones":
        return torch.ones(shape, dtype=torch.int64)
    if spec.default == "positions":
        return torch.arange(shape[-1]).expand(shape) + sizes.get("past", 0)
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype))


def _shapes(
    network: TransformersNetwork, arguments: Mapping[str, Any], axes: Sequence[dict[int, Any]]
) -> dict[str, Any]:
    """Returns the dynamic axes of each argument, in the structure of its pytree."""
    shapes: dict[str, Any] = dict(zip(network.inputs, axes, strict=True))
    if ENCODED in shapes:
        shapes["encoder_outputs"] = [shapes.pop(ENCODED)]
        shapes["attention_mask"] = shapes.pop(ENCODED_MASK)
    past = [shapes.pop(name) for name in network.inputs if name.startswith(PAST)]
    if PAST in arguments:
        shapes[PAST] = _cache_shapes(arguments[PAST], past, network)
    return {name: shapes[name] for name in arguments if name in shapes}


def _cache_shapes(cache: Any, axes: list[dict[int, Any]], network: TransformersNetwork) -> Any:
    """Returns the dynamic axes of a cache, in the structure of its pytree."""
    from transformers.exporters.exporter_dynamo import (
        get_auto_dynamic_shapes,
        register_cache_pytrees_for_model,
    )

    register_cache_pytrees_for_model(network.wrapped)
    shapes = get_auto_dynamic_shapes(cache)
    return shapes if len(shapes) != len(axes) else axes


def _set_names(
    graph: ir.Model,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    fixed: Mapping[str, int],
) -> None:
    """Gives our names to a graph's inputs, outputs and axes, in place."""
    names: dict[str, str] = {}
    for value, spec in zip(graph.graph.inputs, inputs, strict=True):
        assert value.shape is not None
        for size, axis in zip(value.shape, spec.shape, strict=True):
            if not isinstance(axis, str) or axis in fixed:
                continue
            if isinstance(size, int):
                raise TraceError(
                    f"the axis {axis} of {spec.name} is always {size} in this network",
                    hint=f"fix it: --{axis} {size}"
                    if axis in ("batch", "tokens")
                    else "export it without a cache: --set use_cache=false",
                )
            names[str(size)] = axis
        value.name = spec.name
    _name_axes(graph, names)
    for value, spec in zip(graph.graph.inputs, inputs, strict=True):
        value.shape = ir.Shape(spec.within(fixed))
    # An output has a prefix if an input has the same name.
    traced = {str(value.name).removeprefix("output."): value for value in graph.graph.outputs}
    graph.graph.outputs.clear()
    for spec in outputs:
        value = traced[_exported_name(spec.name, traced)]
        value.name = spec.name
        value.shape = ir.Shape(spec.within(fixed))
        graph.graph.outputs.append(value)


def _exported_name(name: str, outputs: Mapping[str, Any]) -> str:
    """Returns the library's name of an output; for a part of a cache this is a path."""
    if not name.startswith(f"{PRESENT}."):
        return name
    _, layer, part = name.split(".")
    paths = [
        f"{cache}{attribute}.layers.{layer}.{part}s"
        for cache in CACHES
        for attribute in ("", ".self_attention_cache")
    ]
    return next(path for path in paths if path in outputs)


def _name_axes(graph: ir.Model, names: Mapping[str, str]) -> None:
    """Replaces the tracer's symbols with the names of axes in the shape of every value."""
    for subgraph in graph.graphs():
        outputs = (value for node in subgraph for value in node.outputs)
        for value in (*subgraph.inputs, *outputs):
            if value.shape is not None:
                value.shape = ir.Shape([_renamed(size, names) for size in value.shape])


def _renamed(size: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(size, int) or size.value is None:
        return size if isinstance(size, int) else None
    return _SYMBOL.sub(lambda match: names.get(match[0], match[0]), str(size.value))
