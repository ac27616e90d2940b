"""What other programs and old files rely on: names, orders, hashes and numbers of experts."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
from moexport.bench.engines import KINDS, titles
from moexport.bench.journal import Journal
from moexport.bench.report import charts, sections
from moexport.cli import COMMANDS
from moexport.commands.program import declared_command
from moexport.data.feeds import FeedHash
from moexport.exporter.checkpoints import settings
from moexport.exporter.families import all_names
from moexport.exporter.job import calibration_job
from moexport.exporter.model import fingerprint
from moexport.exporter.tensorrt.backends import BACKENDS
from moexport.exporter.tensorrt.cache import engine_key
from moexport.graphs.k import parse_k, resolve_k
from moexport.graphs.lowerings import KINDS as KINDS_OF_LAYER
from moexport.graphs.targets import TARGETS
from moexport.plugins.token_routed.tests.test_vmoe_routed import loaded as routed_model
from moexport.plugins.token_routed.tests.test_vmoe_vit import read_case as read_jax_case
from moexport.plugins.tune.space import Point
from moexport.tests.golden.golden import ROOT, check, compared
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case

ROUTED = "jax_vmoe_every2_k1_indices"

KS: dict[str, Any] = {
    "n": "n",
    "0.5": "0.5",
    "n/4": "n/4",
    "0.3": "0.3",
    "3": "3",
    "list": None,
    "input": "input",
}


def model_of(case: str) -> Any:
    if case == ROUTED:
        return routed_model(read_jax_case(ROUTED))
    recorded = read_case(case)
    return moexport.load(recorded.weights, family=recorded.family, config=recorded.config)


def resolved(case: str) -> dict[str, Any]:
    model = model_of(case)
    specs = {name: layer.spec for name, layer in model.layers.items()}
    several = ",".join(str(1 + index) for index in range(len(specs)))
    found: dict[str, Any] = {}
    for name, text in KS.items():
        try:
            found[name] = resolve_k(parse_k(several if text is None else text), specs)
        except moexport.UsageError as error:
            found[name] = f"{error.message} | {error.hint}"
    return found


def test_the_k_of_each_layer_is_as_recorded() -> None:
    check("k", {case: resolved(case) for case in ("soft_moe_vit", "mumoe_cp_2level", ROUTED)})


def signatures() -> dict[str, str]:
    return {
        name: str(inspect.signature(value))
        for name in moexport.__all__
        if callable(value := getattr(moexport, name))
    }


def test_signatures_of_what_users_call_are_as_recorded() -> None:
    check("signatures", signatures())


def test_options_of_commands_are_as_recorded() -> None:
    commands = {
        name: {
            parameter.name: "…" if parameter.required else repr(parameter.default)
            for parameter in declared_command(command).params
        }
        for name, command in sorted((command.name, command) for command in COMMANDS)
    }
    check("options", commands)


def orders() -> dict[str, Any]:
    return {
        "families": all_names(),
        "targets": list(TARGETS.names),
        "lowerings": [
            f"{kind.name} {record.name}" for kind in KINDS_OF_LAYER for record in kind.lowerings
        ],
        "machines": list(dict.fromkeys(record.machine.name for record in TARGETS)),
        "backends": list(BACKENDS),
        "engines": list(KINDS),
        "titles": dict(titles()),
        "sections": [section.name for section in sections.all_sections()],
        "symbols": list(charts.SYMBOLS),
        "kinds of configuration": dict(settings.KINDS),
        "names": list(moexport.__all__),
    }


def test_orders_of_the_registries_are_as_recorded() -> None:
    check("orders", orders())


def test_the_schema_of_results_is_as_recorded() -> None:
    schema = json.loads((ROOT / "bench" / "results.schema.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
    check("schema", {"hash": digest, "definitions": sorted(schema.get("$defs", {}))})


def keys(folder: Path) -> dict[str, Any]:
    """Hashes by which files of an earlier version are known again."""
    feed = FeedHash()
    feed.update(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    layer = model_of("soft_moe_lucidrains")
    x = read_case("soft_moe_lucidrains").x
    Journal(folder / "journal", {"model": "a", "request": {"k": [1, 2], "batch": None}})
    return {
        "fingerprints": {case: fingerprint(model_of(case)) for case in (*SOFT_MOE, *MUMOE, ROUTED)},
        "feed": feed.hexdigest(),
        "origin": {
            field.name: getattr(origin, field.name)
            for origin in [calibration_job(layer, x).full_origin()]
            for field in fields(origin)
        },
        "engine": engine_key({"files": {"weights.bin": "a"}, "profiles": [{"batch": [1, 2, 3]}]}),
        "journal": (folder / "journal").read_text(encoding="utf-8").splitlines(),
        "point": [field.name for field in fields(Point)] if is_dataclass(Point) else [],
    }


def test_hashes_by_which_old_files_are_known_are_as_recorded(tmp_path: Path) -> None:
    check("keys", keys(tmp_path))


@pytest.mark.parametrize("damage", ["order", "value", "missing", "added", "length"])
def test_a_difference_is_found(damage: str) -> None:
    before = {"families": ["a", "b"], "k": {"layer": 3}}
    after = {
        "order": {"k": {"layer": 3}, "families": ["a", "b"]},
        "value": {"families": ["b", "a"], "k": {"layer": 3}},
        "missing": {"families": ["a", "b"]},
        "added": {"families": ["a", "b"], "k": {"layer": 3, "other": None}},
        "length": {"families": ["a", "b", "c"], "k": {"layer": 3}},
    }[damage]
    assert compared(before, before) == []
    assert compared(before, after)


def test_another_weight_has_another_fingerprint() -> None:
    model = model_of("soft_moe_lucidrains")
    before = fingerprint(model)
    next(iter(model.module.parameters())).data.view(-1)[0] += 1
    assert fingerprint(model) != before
