"""The graphs and weights of the recorded cases, lowered from one trace each, without parity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from moexport.tests.command import run
from moexport.tests.golden.golden import RECORDED, WRITES, check, compared, other_versions
from moexport.tests.golden.graphs import CASES, VALUES, Lowering, facts, pairwise
from moexport.tests.recorded import read_case

NAMES = (*VALUES, "lowering")

SOME = 5
"""`make test` lowers one in so many of a case's settings, others of each case."""


def table_of(case: str, folder: Path) -> Path | None:
    """The recorded ranges of a case: what a calibration finds differs by CPU."""
    place = RECORDED / "tables" / f"{case}.json"
    if WRITES and not place.exists():
        recorded = read_case(case)
        np.savez(folder / "x.npz", input=recorded.x)
        sets = [f"--set={key}={value}" for key, value in recorded.config.items()]
        words = ["--family", recorded.family, *sets, "--data", str(folder / "x.npz")]
        place.parent.mkdir(parents=True, exist_ok=True)
        run("calibrate", recorded.weights, *words, "-o", place)
    return place if place.exists() else None


def recorded_settings(case: str) -> list[dict[str, str]]:
    content = json.loads((RECORDED / "graphs" / f"{case}.json").read_text(encoding="utf-8"))
    return [dict(zip(NAMES, title.split(" | "), strict=True)) for title in content]


def compare(case: str, settings: list[dict[str, str]], folder: Path) -> list[str]:
    """Lowers settings of a case, and returns how the results differ from the recorded ones."""
    lowering = Lowering(case, table_of(case, folder))
    place = RECORDED / "graphs" / f"{case}.json"
    recorded: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    differences = []
    for number, setting in enumerate(settings):
        title = " | ".join(setting.values())
        found = lowering.written(setting, folder / f"{number}")
        differences += compared(recorded[title], found, f"{case} {title}")
    return differences


@pytest.mark.parametrize("case", CASES)
def test_some_graphs_of_a_recorded_case_are_as_recorded(case: str, tmp_path: Path) -> None:
    if other_versions():
        pytest.skip(f"recorded with the versions of constraints.txt, not {other_versions()}")
    if WRITES:
        pytest.skip("all are being recorded")
    settings = recorded_settings(case)[CASES.index(case) % SOME :: SOME]
    assert compare(case, settings, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_graphs_of_a_recorded_case_are_as_recorded(case: str, tmp_path: Path) -> None:
    if not WRITES:
        if other_versions():
            pytest.skip(f"recorded with the versions of constraints.txt, not {other_versions()}")
        assert compare(case, recorded_settings(case), tmp_path) == []
        return
    lowering = Lowering(case, table_of(case, tmp_path))
    settings = pairwise([*lowering.possible()], case)
    found = {
        " | ".join(setting.values()): lowering.written(setting, tmp_path / f"{number}")
        for number, setting in enumerate(settings)
    }
    check(f"graphs/{case}", found)


@pytest.mark.parametrize("damage", ["attribute", "name", "shape", "initializer", "metadata", "op"])
def test_a_changed_graph_has_another_hash(damage: str, tmp_path: Path) -> None:
    case = CASES[0]
    setting = next(s for s in recorded_settings(case) if s["lowering"] != "auto")
    Lowering(case, table_of(case, tmp_path)).written(setting, tmp_path / "out")
    file = tmp_path / "out" / "model.onnx"
    before = facts(file)
    model = onnx.load(file, load_external_data=False)
    nodes = model.graph.node
    if damage == "attribute":
        node = next(n for n in nodes if any(a.type == onnx.AttributeProto.INT for a in n.attribute))
        next(a for a in node.attribute if a.type == onnx.AttributeProto.INT).i += 1
    elif damage == "name":
        nodes[0].name += "x"
    elif damage == "shape":
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "m"
    elif damage == "initializer":
        small = next(t for t in model.graph.initializer if not t.external_data)
        array = onnx.numpy_helper.to_array(small).copy()
        array.flat[0] += 1
        small.CopyFrom(onnx.numpy_helper.from_array(array, small.name))
    elif damage == "metadata":
        model.metadata_props[0].value += " "
    else:
        nodes[0].op_type = "Identity"
    onnx.save(model, file)
    assert facts(file)["hash"] != before["hash"]
