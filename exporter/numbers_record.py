"""What a manifest says of the numbers that a graph computes in, beside each layer's precision."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .options import ExportOptions
from .precision import NumbersPlan


def numbers_record(plan: NumbersPlan, options: ExportOptions) -> dict[str, Any]:
    """Returns the record as plain data: empty for a model in FP32 throughout.

    `rest` is the float type of what is not quantised, `router` that of routers and gates;
    `fp32_nodes` are the nodes that stayed in FP32 for this model's weights or values,
    `usual_fp32_nodes` counts the others by op type. With INT8: how weights and activations are
    written, and `linears`, the host's, null where they are INT8 and the reason where not;
    `retention` (`retained.Retention`) where `--min-retention` was asked for.
    """
    numbers, target = options.numbers, options.target
    if numbers.precision == "fp32":
        return {}
    usual: dict[str, int] = {}
    for node in plan.fp32_nodes:
        if node.usual:
            usual[node.op_type] = usual.get(node.op_type, 0) + 1
    record: dict[str, Any] = {
        "rest": numbers.float_name(target),
        "router": "fp32",
        "io": numbers.io,
        "fp32_nodes": [asdict(node) for node in plan.fp32_nodes if not node.usual],
        "usual_fp32_nodes": usual,
    }
    if numbers.precision == "int8":
        grid, form = numbers.grid(target), numbers.form(target)
        record |= {
            "form": form,
            "weights": f"{grid.dtype.name.lower()}, per expert and output channel, "
            f"-{grid.levels} to {grid.levels}",
            "activations": "int8, per tensor, symmetric" if form == "qdq" else "uint8, per tensor",
            "linears": {linear.node: linear.reason for linear in plan.linears},
        }
    if numbers.retention is not None:
        record["retention"] = numbers.retention.as_json()
    return record
