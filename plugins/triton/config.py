"""Writes `config.pbtxt`, a model's configuration for Triton, in protobuf's text format.

The fields are those of `ModelConfig` in model_config.proto (triton-inference-server/common) and of
the page "Model Configuration", as of November 2026. A test parses the text with the protobuf
definitions of NVIDIA's client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import BundleError
from ...exporter.bundle.manifest import TensorSpec
from ...exporter.inputs import INTEGERS

TYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "bool": "TYPE_BOOL",
    **{name: f"TYPE_{name.upper()}" for name in INTEGERS},
}

WARM_UP = "warmup"
"""The subfolder of a model in which Triton looks for the files of `model_warmup`."""


class Symbol(str):
    """A protobuf enum value, which is written without quotes."""

    __slots__ = ()


def text(fields: Mapping[str, Any]) -> str:
    """Returns a message in protobuf's text format; a list is a repeated field."""
    return "".join(f"{line}\n" for line in _lines(fields))


def _lines(fields: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, list) and all(isinstance(item, int) for item in value):
            yield f"{indent}{name}: [ {', '.join(map(str, value))} ]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(item, f"{indent}  ")
                yield f"{indent}}}"
            elif isinstance(item, bool | Symbol):
                yield f"{indent}{name}: {str(item).lower() if isinstance(item, bool) else item}"
            else:
                yield f"{indent}{name}: {json.dumps(item, ensure_ascii=False)}"


def tensor_fields(record: TensorSpec, *, batched: bool, **extra: Any) -> dict[str, Any]:
    """Returns an input or output: dynamic sizes are -1, and Triton adds the batch axis."""
    shape = record.shape[1:] if batched else record.shape
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    if record.dtype not in TYPES:
        raise BundleError(
            f"'{record.name}' is of type {record.dtype[:40]!r}, which Triton does not support"
        )
    return {"name": record.name, "data_type": Symbol(TYPES[record.dtype]), "dims": sizes, **extra}


def entries(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the entries of the field `parameters`."""
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items()]


def warm_up(inputs: Mapping[str, np.ndarray], sizes: Sequence[int], *, batched: bool) -> list[Any]:
    """Returns requests with these inputs, which Triton runs before it is ready.

    If Triton batches, a request contains one input, which Triton repeats to each of the sizes;
    otherwise it contains a batch.
    """
    described = [
        {
            "key": name,
            "value": {
                "data_type": Symbol(TYPES[array.dtype.name]),
                "dims": list(array.shape[1:] if batched else array.shape),
                "input_data_file": file_name(name),
            },
        }
        for name, array in inputs.items()
    ]
    return [
        {"name": f"batch {size}", "batch_size": size, "inputs": described}
        for size in (sizes if batched else [1])
    ]


def file_name(tensor: str) -> str:
    """Returns a valid file name for a tensor."""
    return "".join(c if c.isalnum() else "_" for c in tensor)
