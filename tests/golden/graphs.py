"""The exports whose graphs are recorded, and the text of a graph that is hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import moexport
import onnx
import onnx_ir as ir
from moexport.errors import MoexportError
from moexport.exporter.export import plan_job
from moexport.exporter.job import ExportJob, export_job
from moexport.exporter.options import ExportOptions
from moexport.exporter.trace import trace
from moexport.exporter.write import write_graphs
from moexport.graphs.k import parse_k
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.sizes import DEFAULT_BATCH, AxisRange
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case

CASES = (*SOFT_MOE, *MUMOE)

VALUES: dict[str, tuple[str, ...]] = {
    "target": ("onnx", "ort-cpu", "ort-cuda", "ort-web", "openvino", "tensorrt", "tensorrt-rtx"),
    "precision": ("fp32", "fp16", "bf16", "int8", "int4", "fp8"),
    "k": ("n", "0.5", "1", "input"),
    "more": ("", "expose_routing", "renormalize", "fixed batch"),
}


def pairwise(settings: Sequence[dict[str, str]], case: str) -> list[dict[str, str]]:
    """Returns few of the settings, in which each pair of two options' values occurs that can.

    Cases begin at different ones, so that together they have more than pairs.
    """
    start = int(digest(case), 16) % len(settings)
    turned = [*settings[start:], *settings[:start]]
    missing = {pair for setting in turned for pair in pairs(setting)}
    chosen = []
    while missing:
        best = max(turned, key=lambda setting: len(missing & set(pairs(setting))))
        chosen.append(best)
        missing -= set(pairs(best))
    return chosen


def pairs(setting: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """The pairs of two options' values in a setting."""
    items = list(setting.items())
    for index, (name, value) in enumerate(items):
        for other, other_value in items[index + 1 :]:
            yield name, value, other, other_value


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def facts(file: Path) -> dict[str, Any]:
    """A graph in a few words, for people who look for a change, and its hash."""
    model = onnx.load(file, load_external_data=False)
    ops: dict[str, int] = {}
    for node in model.graph.node:
        ops[node.op_type] = ops.get(node.op_type, 0) + 1
    text = " ".join(f"{name}:{count}" for name, count in sorted(ops.items()))
    return {"ops": text, "hash": digest(text_of(model))}


def text_of(model: onnx.ModelProto) -> str:
    """All that a model's file has to say, but the version of what wrote it."""
    imports = sorted((entry.domain, entry.version) for entry in model.opset_import)
    metadata = sorted((entry.key, entry.value) for entry in model.metadata_props)
    about = model.doc_string.rpartition(" ")[0]
    lines = [repr((model.ir_version, imports, metadata, about, len(model.functions)))]
    lines += _graph(model.graph)
    return "\n".join(lines)


def _graph(graph: onnx.GraphProto) -> Iterator[str]:
    yield repr((graph.name, graph.doc_string))
    for port in (*graph.input, *graph.output, *sorted(graph.value_info, key=lambda v: v.name)):
        kind = port.type.tensor_type
        sizes = [size.dim_value or size.dim_param for size in kind.shape.dim]
        yield repr((port.name, kind.elem_type, sizes))
    for tensor in graph.initializer:
        yield _tensor(tensor)
    for node in graph.node:
        yield repr((node.op_type, node.domain, node.name, list(node.input), list(node.output)))
        for attribute in sorted(node.attribute, key=lambda a: a.name):
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield f"{attribute.name} {{"
                yield from _graph(attribute.g)
                yield "}"
            elif attribute.type == onnx.AttributeProto.TENSOR:
                yield f"{attribute.name} {_tensor(attribute.t)}"
            else:
                yield repr((attribute.name, onnx.helper.get_attribute_value(attribute)))


def _tensor(tensor: onnx.TensorProto) -> str:
    place = sorted((entry.key, entry.value) for entry in tensor.external_data)
    content = "" if place else digest(onnx.numpy_helper.to_array(tensor).tobytes())
    return repr((tensor.name, tensor.data_type, list(tensor.dims), place, content))


class Lowering:
    """Lowers a recorded case in one setting after another, from one trace."""

    def __init__(self, case: str, table: Path | None) -> None:
        recorded = read_case(case)
        self.model = moexport.load(recorded.weights, family=recorded.family, config=recorded.config)
        self.table = table
        self._traces: dict[str, ir.Model] = {}

    def job(self, setting: Mapping[str, Any]) -> ExportJob:
        batch = AxisRange(4, 4, 4) if setting["more"] == "fixed batch" else DEFAULT_BATCH
        options = ExportOptions(
            k=parse_k(setting["k"]),
            target=setting["target"],
            lowering=setting["lowering"],
            precision=setting["precision"],
            calibration=self.table if setting["precision"] in ("int8", "fp8") else None,
            verify=False,
            renormalize=setting["more"] == "renormalize",
            expose_routing=setting["more"] == "expose_routing",
            batch=batch,
        )
        return export_job(self.model, options)

    def possible(self) -> Iterator[dict[str, str]]:
        """The settings that are not refused."""
        kind = next(iter(self.model.layers.values())).spec.kind
        values = {**VALUES, "lowering": ("auto", *lowerings_of(kind))}
        for each in product(*values.values()):
            setting = dict(zip(values, each, strict=True))
            try:
                self.job(setting)
            except MoexportError:
                continue
            yield setting

    def written(self, setting: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Writes a setting's graphs and weights to a new folder; returns what they are."""
        folder.mkdir()
        job = self.job(setting)
        key = json.dumps([dict(job.fixed), job.options.least_opset, job.traced_sizes])
        if key not in self._traces:
            self._traces[key] = trace(
                job.model,
                opset=job.options.least_opset,
                fixed=dict(job.fixed),
                sizes=job.traced_sizes,
            )
        traced = self._traces[key].clone()
        traced.meta.update(self._traces[key].meta)
        plan = plan_job(job, traced=traced)
        write_graphs(plan, folder)
        return {
            "choices": [
                f"{layer.name} k={layer.k} {layer.lowering.name}: {layer.reason}"
                for graph in plan.graphs
                for layer in graph.layers
            ],
            "notes": list(plan.notes),
            **{graph.file: facts(folder / graph.file) for graph in plan.graphs},
            **{
                file.name: digest(file.read_bytes())
                for file in sorted(folder.iterdir())
                if file.suffix != ".onnx"
            },
        }
