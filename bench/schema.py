"""The JSON Schema of `results.json`: made from the dataclasses, kept in `results.schema.json`."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from importlib import resources
from typing import Any, Union, get_args, get_origin, get_type_hints

from .results import SCHEMA, Absent, ModelInfo, Results, Row

FILE = "results.schema.json"
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
    "Work.operations": POSITIVE,
    "Work.int8_operations": POSITIVE,
    "Work.bytes": POSITIVE,
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
    "Part.ms": POSITIVE,
    "Part.part": {"enum": ["router", "dispatch", "experts", "combine", "host", "runtime"]},
}
"""What the types do not say of a field."""


def schema() -> dict[str, Any]:
    """Returns the schema, made from the dataclasses that are written and read."""
    definitions: dict[str, Any] = {}
    rows = _list_of(Row, definitions)
    models = _list_of(ModelInfo, definitions)
    absent = _list_of(Absent, definitions)
    return {
        "$schema": DIALECT,
        "title": "results.json of moexport bench",
        "description": _first_line(Results),
        "type": "object",
        "required": ["schema", "environment", "model", "rows"],
        "properties": {
            "schema": {"const": SCHEMA},
            "created": {"type": "string"},
            "command": {"type": "string"},
            "environment": {"type": "object"},
            "model": {"anyOf": [models["items"], {"type": "null"}]},
            "models": models,
            "protocol": {"type": "object"},
            "absent": absent,
            "rows": rows,
            "analyses": {"type": "object"},
        },
        "additionalProperties": False,
        "$defs": dict(sorted(definitions.items())),
    }


def kept_schema() -> dict[str, Any]:
    """Returns the schema as the package ships it."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def schema_text() -> str:
    """Returns the text of the shipped file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _list_of(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": _reference(kind, definitions)}


def _reference(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # holds the place while its own fields are walked
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    found = fields(kind)
    required = [
        each.name for each in found if each.default is MISSING and each.default_factory is MISSING
    ]
    return {
        "description": _first_line(kind),
        "type": "object",
        "properties": {
            each.name: _typed(hints[each.name], definitions, f"{kind.__name__}.{each.name}")
            for each in found
        },
        "required": required,
        "additionalProperties": False,
    }


_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object"}


def _typed(hint: Any, definitions: dict[str, Any], name: str) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in get_args(hint) if each is not type(None))
        return {"anyOf": [_typed(inner, definitions, name), {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": _typed(get_args(hint)[0], definitions, "")}
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _reference(hint, definitions)
    return {"type": _PLAIN[origin or hint]} | LIMITS.get(name, {})


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]
