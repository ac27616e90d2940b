"""The JSON Schema of results: shipped, up to date, and true of every results file here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from moexport.bench.results import Results, as_json
from moexport.docs.results_schema import FILE, schema

ROOT = Path(__file__).parents[2]


def results_files() -> list[Path]:
    """Every results file of the repository: what tests keep of their own has no schema."""
    found = [*(ROOT / "perf").rglob("*.json"), *(ROOT / "docs").rglob("*.json")]
    bodies = {path: json.loads(path.read_text(encoding="utf-8")) for path in found}
    return [path for path, body in bodies.items() if "rows" in body and "schema" in body]


def kept_schema() -> Any:
    """The schema as the package ships it."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def problems(body: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(kept_schema())
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(body)]


def test_the_shipped_schema_is_the_one_of_the_dataclasses() -> None:
    jsonschema.Draft202012Validator.check_schema(kept_schema())
    assert kept_schema() == schema(), "python docs/refresh.py schema writes it"


@pytest.mark.parametrize("path", results_files(), ids=lambda path: path.name)
def test_the_results_files_of_the_repository_fit(path: Path) -> None:
    assert problems(json.loads(path.read_text(encoding="utf-8"))) == []


def test_there_are_results_files() -> None:
    assert any(path.name == "layers-cpu.json" for path in results_files())


def test_what_is_written_fits_and_what_is_not_is_named(results: Results) -> None:
    body = json.loads(json.dumps(as_json(results)))
    assert problems(body) == []
    body["rows"][1]["k"] = 0
    body["rows"][1]["latency_ms"]["median"] = "fast"
    assert [problem.split(":")[0] for problem in problems(body)] == [
        "$.rows[1].k",
        "$.rows[1].latency_ms",
    ]
