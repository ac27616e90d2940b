"""`config.pbtxt`: a model's configuration for Triton, in protobuf's text format.

The fields are those of `ModelConfig` in model_config.proto (triton-inference-server/common) and of
the page "Model Configuration", read in November 2026; a test reads the text with the protobuf of
NVIDIA's own client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import BundleError
from ...exporter.bundle.manifest import TensorSpec
from ...exporter.inputs import WHOLE

TYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "bool": "TYPE_BOOL",
    **{name: f"TYPE_{name.upper()}" for name in WHOLE},
}

WARM_UP = "warmup"
"""The folder of a model in which Triton looks for the files of `model_warmup`."""


class Word(str):
    """A protobuf name, written without quotes."""

    __slots__ = ()


def text(fields: Mapping[str, Any]) -> str:
    """Returns a message in protobuf's text format; a list is a field that is repeated."""
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
            elif isinstance(item, bool | Word):
                yield f"{indent}{name}: {str(item).lower() if isinstance(item, bool) else item}"
            else:
                yield f"{indent}{name}: {json.dumps(item, ensure_ascii=False)}"


def port(record: TensorSpec, *, batched: bool, **more: Any) -> dict[str, Any]:
    """Returns an input or output: a dynamic size is -1, and Triton adds the batch."""
    shape = record.shape[1:] if batched else record.shape
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    if record.dtype not in TYPES:
        raise BundleError(f"'{record.name}' is of type {record.dtype[:40]!r}, which Triton lacks")
    return {"name": record.name, "data_type": Word(TYPES[record.dtype]), "dims": sizes, **more}


def entries(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the entries of `parameters`."""
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items()]


def warm_up(inputs: Mapping[str, np.ndarray], sizes: Sequence[int], *, batched: bool) -> list[Any]:
    """Returns the requests that Triton makes with these inputs before it is ready.

    If Triton batches, each is one input, which it repeats up to each of the sizes; else a batch.
    """
    described = [
        {
            "key": name,
            "value": {
                "data_type": Word(TYPES[array.dtype.name]),
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
    """Returns a valid name of a file for a tensor."""
    return "".join(c if c.isalnum() else "_" for c in tensor)
