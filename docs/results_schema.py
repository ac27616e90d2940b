"""Generates the JSON Schema of `results.json` from the dataclasses: bench/results.schema.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from moexport.bench.results import SCHEMA, Absent, ModelInfo, Results, Row

FILE = Path(__file__).parents[1] / "bench" / "results.schema.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"

SHARE = {"minimum": 0, "maximum": 1}
COUNT = {"minimum": 1}
POSITIVE = {"minimum": 0}

LIMITS: dict[str, dict[str, Any]] = {
    "Row.k": COUNT,
    "Row.experts": COUNT,
    "Row.batch": COUNT,
    "Row.scope": {"enum": ["gpu", "end-to-end"]},
    "Row.limit_ms": POSITIVE,
    "Workload.operations": POSITIVE,
    "Workload.int8_operations": POSITIVE,
    "Workload.bytes": POSITIVE,
    "Row.throughput": POSITIVE,
    "Row.peak_memory_mb": POSITIVE,
    "Row.runtime_memory_mb": POSITIVE,
    "Latency.n": COUNT,
    "Latency.spread": POSITIVE,
    "Accuracy.top1": SHARE,
    "Accuracy.top5": SHARE,
    "Accuracy.n": COUNT,
    "Perplexity.value": {"minimum": 1},
    "RoutingAgreement.jaccard": SHARE,
    "RoutingAgreement.exact": SHARE,
    "PartTime.ms": POSITIVE,
    "PartTime.part": {"enum": ["router", "dispatch", "experts", "combine", "host", "runtime"]},
}
"""Facts about a field that its type does not express."""


def schema() -> dict[str, Any]:
    """Returns the schema, generated from the dataclasses that are written and read."""
    (row, model, absent), found = msgspec.json.schema_components(
        (Row, ModelInfo, Absent), ref_template="#/$defs/{name}"
    )
    return {
        "$schema": DIALECT,
        "title": "results.json of moexport bench",
        "description": _first_line(Results.__doc__ or ""),
        "type": "object",
        "required": ["schema", "environment", "model", "rows"],
        "properties": {
            "schema": {"const": SCHEMA},
            "created": {"type": "string"},
            "command": {"type": "string"},
            "environment": {"type": "object"},
            "model": {"anyOf": [model, {"type": "null"}]},
            "models": {"type": "array", "items": model},
            "protocol": {"type": "object"},
            "absent": {"type": "array", "items": absent},
            "rows": {"type": "array", "items": row},
            "analyses": {"type": "object"},
        },
        "additionalProperties": False,
        "$defs": {name: _strict(name, one) for name, one in sorted(found.items())},
    }


def text() -> str:
    """Returns the content of the shipped file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _strict(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Adds limits to msgspec's schema of a dataclass, and forbids other fields."""
    for key, field in found["properties"].items():
        field.pop("default", None)
        (field["anyOf"][0] if "anyOf" in field else field).update(LIMITS.get(f"{name}.{key}", {}))
    return {
        "description": _first_line(found["description"]),
        "type": "object",
        "properties": found["properties"],
        "required": found["required"],
        "additionalProperties": False,
    }


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
