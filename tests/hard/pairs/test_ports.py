"""Each row of the matrix of ports ends in what the network gives in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from moexport.tests.command import Outcome, run

from . import ports

QUICK = [
    ("several", "uint8", "1:8:32", "run"),
    ("dictionary", "bool", "1:8:32", "run"),
    ("several outputs", "int32", "2:3:5", "run"),
]
SLOW = [row for row in ports.rows() if row not in QUICK]


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ports_net", raising=False)


def succeeded(*arguments: str) -> Outcome:
    outcome = run(*arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def assert_computes(form: str, dtype: str, batch: str, bound: float) -> None:
    """`run` gives what PyTorch gives in float64, in batches of both ends of the range."""
    sizes = batch.split(":")
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        given = ports.inputs(form, dtype, 2 * int(size))
        np.savez("x.npz", **given)  # type: ignore[arg-type]
        succeeded("run", "out", "-i", "x.npz", "-o", "y.npz", "--batch-size", size, "--force")
        found, wanted = np.load("y.npz"), ports.wanted(form, dtype, given)
        assert [*found] == [*wanted]
        for name, array in wanted.items():
            assert found[name].shape == array.shape
            if array.dtype.kind == "f":
                assert np.abs(found[name] - array).max() <= bound * np.abs(array).max()
            else:
                assert found[name].dtype == array.dtype
                assert (found[name] != array).mean() <= (0.0 if bound < 1e-3 else 0.05)


def check(form: str, dtype: str, batch: str, done: str) -> None:
    given = ("--set", f"form={form}", "--set", f"dtype={dtype}")
    factory = ("ports_net:net", "--adapter", "ports_net:adapt", *given)
    data = {**ports.inputs(form, dtype, 24), "label": np.arange(24) % 3}
    np.savez("data.npz", **data)  # type: ignore[arg-type]
    options = {
        "int8": ("--precision", "int8", "--data", "data.npz"),
        "openvino": ("--target", "openvino"),
    }
    succeeded("export", *factory, "-o", "out", "--batch", batch, *options.get(done, ()))
    assert_computes(form, dtype, batch, 0.1 if done == "int8" else 1e-5)
    names = [*ports.inputs(form, dtype, 1)]
    match done:
        case "verify":
            succeeded("verify", "out")
        case "inspect":
            record = json.loads(succeeded("inspect", "out", "--json").out)
            held = [port["name"] for port in record["inputs"]]
            assert held == names
        case "calibrate":
            succeeded("calibrate", *factory, "--data", "data.npz", "-o", "table.json")
        case "serve":
            record = json.loads(succeeded("triton", "out", "-o", "served", "--json").out)
            assert names == record[0]["inputs"]
        case "bench":
            size = batch.split(":", maxsplit=1)[0]
            quick = ("--engine", "onnxruntime", "--no-memory", "--rounds", "5", "--threads", "1")
            succeeded("bench", *factory, "-o", "report", "--batch", size, *quick)


@pytest.mark.parametrize("row", QUICK, ids=" ".join)
def test_a_row_computes_what_pytorch_does_in_float64(row: ports.Row) -> None:
    check(*row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW, ids=" ".join)
def test_every_row_computes_what_pytorch_does_in_float64(row: ports.Row) -> None:
    check(*row)
