"""`make gpu-check` loses nothing: what fails is a result, and what had no time is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from moexport.docs.sources import ROOT
from moexport.exporter.tensorrt.backends import TENSORRT, TENSORRT_RTX, Gpu, first_gpu
from moexport.exporter.tensorrt.ort_provider import PROVIDER_LIBRARY, load_libraries
from moexport.perf import gpu_check
from moexport.perf.gpu_check import (
    Checked,
    Passed,
    Row,
    Spread,
    Timed,
    absent,
    exports,
    no_units,
    outcome,
    parser,
    run,
    types_of,
)
from moexport.tests.exporter.tensorrt.engines import needs_rtx

H100 = Gpu("NVIDIA H100 80GB HBM3", "9.0", "580.65.06")
SHAPE = {"dim": 24, "experts": 2, "hidden": 8, "depth": 2}


def tiny(output: Path, *more: str) -> Namespace:
    """The request of a check of small models, its results in a file."""
    shape = [word for name, size in SHAPE.items() for word in (f"--{name}", str(size))]
    return parser().parse_args(["-o", str(output), *shape, *more])


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_unit_that_crashes_is_a_result() -> None:
    code = "import os, sys; print('fault', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    row = outcome("tensorrt, fp16, gather", python(code), "{}")
    assert row["failure"] is True
    assert row["what"] == "tensorrt, fp16, gather"
    assert row["why"] == "its process ended with status -11"
    assert row["traceback"] == "fault"


def test_a_unit_that_does_not_end_is_a_result() -> None:
    row = outcome("x", python("import time; time.sleep(60)"), "{}", most_s=0.5)
    assert row["why"] == "it took longer than 0 s"


def test_a_unit_that_says_nothing_is_a_result() -> None:
    assert outcome("x", python("pass"), "{}")["failure"] is True


@pytest.mark.slow
@pytest.mark.skipif(first_gpu() is not None, reason="what the check says without a GPU")
def test_failures_are_kept_with_their_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "BACKENDS", {"tensorrt": TENSORRT})
    monkeypatch.setattr(gpu_check, "SMALL", SHAPE)
    output = tmp_path / "gpu-check.json"
    assert run(tiny(output, "--precision", "fp32"), None) is False
    content = json.loads(output.read_text())
    assert content["complete"] is True
    assert content["checked"] == []
    assert content["environment"]["first_gpu"] is None
    assert content["environment"]["packages"]["torch"]
    failed = {row["what"]: row["why"] for row in content["failed"]}
    why = failed["onnxruntime-cuda, small, fp32, gather"]
    assert "there is no NVIDIA GPU here" in why or "has no CUDAExecutionProvider" in why
    if not TENSORRT.installed():
        left_out = {row["what"]: row["why"] for row in content["left_out"]}
        assert "pip install" in left_out["tensorrt"]


@needs_rtx
@pytest.mark.slow
@pytest.mark.skipif(first_gpu() is not None, reason="what the check says without a GPU")
def test_four_bit_weights_reach_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the opset that they need; a lowering whose export is refused takes no other with it."""
    monkeypatch.setattr(gpu_check, "BACKENDS", {"tensorrt-rtx": TENSORRT_RTX})
    monkeypatch.setattr(gpu_check, "LOWERINGS", ("gather", "conditional", "grouped"))
    monkeypatch.setattr(gpu_check, "SMALL", SHAPE | {"dim": 96, "hidden": 32})  # whole blocks
    output = tmp_path / "gpu-check.json"
    part = ("--precision", "int4", "--lowering", "gather,conditional,grouped")
    run(tiny(output, "--dim", "96", "--hidden", "32", *part), None)
    failed = {row["what"]: row["why"] for row in json.loads(output.read_text())["failed"]}
    for size in ("small", "large"):
        for lowering in ("gather", "conditional"):
            what = f"tensorrt-rtx, {size}, int4, {lowering}"
            assert "there is no NVIDIA GPU here" in failed[what]
        assert "'grouped' cannot be used" in failed[f"tensorrt-rtx, {size}, int4, grouped"]


def test_a_precision_that_the_card_lacks_is_left_out() -> None:
    a100 = Gpu("NVIDIA A100-SXM4-80GB", "8.0", "580.65.06")
    assert "has no units for FP8" in str(no_units("fp8", a100))
    assert "BF16" in str(no_units("bf16", Gpu("Tesla T4", "7.5", "580.65.06")))
    assert no_units("fp8", H100) is None
    assert no_units("fp16", a100) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the names are those of Linux")
def test_a_provider_of_another_tensorrt_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PROVIDER_LIBRARY).write_bytes(b"\0libnvinfer.so.9\0")
    monkeypatch.setattr(gpu_check, "load_libraries", partial(load_libraries, tmp_path))
    trouble = absent("onnxruntime-tensorrt", H100)
    assert trouble is not None and not trouble.failure
    assert "needs libnvinfer.so.9" in trouble.why


def checked(precision: Any, *, passed: bool) -> Checked:
    times = [Timed(2, 1, Spread(0.25, 0.01), Spread(0.5, 0.02))]
    return Checked(
        runner="tensorrt",
        size="small",
        precision=precision,
        lowering="gather",
        max_rel=1e-4,
        cosine=1.0,
        samples=16,
        passed=passed,
        times=times,
    )


@pytest.mark.parametrize("passed", [True, False])
def test_results_are_written_after_every_unit(
    passed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "gpu-check.json"

    def written() -> list[str]:
        content = json.loads(output.read_text())
        assert content["complete"] is False
        assert content["environment"]["first_gpu"]["name"] == H100.name
        return [row["precision"] for row in content["checked"]]

    def rows(
        folder: Path, asked: Namespace, gpu: Gpu | None, done: Collection[str]
    ) -> Iterator[Row]:
        assert written() == []
        for count, precision in enumerate(("fp32", "fp16"), 1):
            answer = json.dumps(asdict(checked(precision, passed=passed or count == 1)))
            yield outcome(precision, python(f"print('chatter'); print({answer!r})"), "")
            assert written() == ["fp32", "fp16"][:count]

    monkeypatch.setattr(gpu_check, "rows", rows)
    assert run(tiny(output), H100) is passed
    content = json.loads(output.read_text())
    assert content["complete"] is True
    assert content["checked"][0]["times"][0]["gpu"] == {"median_ms": 0.25, "spread_ms": 0.01}
    assert "passed tensorrt, small, fp32, gather" in capsys.readouterr().err


def test_the_same_command_goes_on_with_what_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "gpu-check.json"
    seen: list[set[str]] = []

    def stopped(
        folder: Path, asked: Namespace, gpu: Gpu | None, done: Collection[str]
    ) -> Iterator[Row]:
        seen.append({*done})
        yield asdict(checked("fp16", passed=True))
        yield asdict(checked("int8", passed=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "rows", stopped)
    for again in (tiny(output), tiny(output), tiny(output, "--hidden", "16")):
        with pytest.raises(KeyboardInterrupt):
            run(again, H100)
    # What failed is tried again, and results of another model are not taken for this one's.
    assert seen == [set(), {"tensorrt, small, fp16, gather"}, set()]


def test_what_there_is_no_time_for_is_said_and_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "BACKENDS", {})
    output = tmp_path / "gpu-check.json"
    assert run(tiny(output, "--minutes", "0", "--precision", "fp16"), H100) is False
    content = json.loads(output.read_text())
    assert content["complete"] is False
    assert {
        gpu_check.ROWS,
        "onnxruntime-cuda, small, fp16, gather",
        "onnxruntime-cuda, large, fp16, gather",
    } <= {row["what"] for row in content["left_out"]}


def test_a_precision_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--precision", "fp16,fp61"])
    assert "fp61: choose from fp16, int8" in capsys.readouterr().err


def test_a_backend_that_does_not_serve_the_gpu_is_left_out_not_failed() -> None:
    left_out = absent("tensorrt-rtx", H100)
    assert left_out is not None
    assert "NVIDIA H100 80GB HBM3 is 9.0" in left_out.why
    assert not left_out.failure
    assert absent("onnxruntime-cuda", H100) is None


def test_a_backend_that_is_not_installed_is_left_out_with_what_installs_it() -> None:
    if TENSORRT.installed():
        pytest.skip(f"{TENSORRT.title} is installed")
    missing = absent("tensorrt", H100)
    assert missing is not None
    assert not missing.failure
    assert TENSORRT.install in missing.why


def test_types_are_counted_in_what_an_inspector_says() -> None:
    tensors = [{"Name": "x", "Format/Datatype": "Half"}, {"Name": "y", "Format/Datatype": "Int8"}]
    layers = {"Layers": [{"Inputs": tensors, "Outputs": tensors[:1]}]}
    assert types_of(layers) == {"Half": 2, "Int8": 1}
    assert types_of(None) == {}


def test_fp16_of_both_sizes_comes_first_and_is_exported_once_for_all_that_run_it() -> None:
    asked = parser().parse_args(["--lowering", "gather,dense"])
    found = list(exports(asked, ["tensorrt", "tensorrt-rtx", *gpu_check.PROVIDER_TARGETS]))
    order = [(each.size, each.precision) for each in found]
    assert [*dict.fromkeys(order)][:3] == [("small", "fp16"), ("large", "fp16"), ("small", "int8")]
    assert len({(each.size, each.precision, each.target) for each in found}) == len(found)
    engines, cuda = found[:2]
    assert (engines.target, cuda.target) == ("tensorrt", "ort-cuda")
    assert engines.runners == {
        "gather": ["tensorrt", "tensorrt-rtx", "onnxruntime-tensorrt"],
        "dense": ["tensorrt", "tensorrt-rtx"],
    }
    assert cuda.runners == {"gather": ["onnxruntime-cuda"]}
    done = {"tensorrt, small, fp16, dense", "tensorrt-rtx, small, fp16, dense"}
    assert next(exports(asked, ["tensorrt", "tensorrt-rtx"], done)).runners == {
        "gather": ["tensorrt", "tensorrt-rtx"]
    }


def test_a_unit_that_time_cut_off_is_left_out_and_not_failed() -> None:
    row = outcome("x", python("import time; time.sleep(60)"), "{}", left_s=0.5)
    assert (row["why"], row["failure"]) == (gpu_check.NO_TIME, False)
    assert outcome("x", python("print(1)"), "{}", left_s=0.0) == row


@pytest.mark.parametrize(
    ("code", "left_s", "expected"),
    [
        ("print('3 passed')", 60.0, {"summary": "3 passed", "passed": True}),
        ("print('1 failed'); raise SystemExit(1)", 60.0, {"why": "1 failed", "failure": True}),
        ("import time; time.sleep(60)", 0.5, {"why": gpu_check.NO_TIME, "failure": False}),
        ("", 0.0, {"why": gpu_check.NO_TIME, "failure": False}),
    ],
)
def test_the_tests_share_the_time_and_are_a_result(
    code: str, left_s: float, expected: Row, tmp_path: Path
) -> None:
    assert gpu_check.tests(left_s, command=python(code)).items() >= expected.items()


def test_tests_that_passed_are_not_run_again_and_are_no_engine_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, seen = tmp_path / "gpu-check.json", []

    def tested(
        folder: Path, asked: Namespace, gpu: Gpu | None, done: Collection[str]
    ) -> Iterator[Row]:
        seen.append({*done})
        yield asdict(Passed(gpu_check.TESTS, summary="3 passed", seconds=1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "rows", tested)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tiny(output), H100)
    assert seen == [set(), {gpu_check.TESTS}]
    monkeypatch.setattr(gpu_check, "rows", lambda *_: iter(()))
    assert run(tiny(output), H100) is False


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("fails", [(), ("install",), ("perf.gpu_check",)])
def test_make_installs_what_the_card_needs_and_fails_when_the_check_does(
    fails: tuple[str, ...], tmp_path: Path
) -> None:
    """The recipe is the project's; a stand-in for Python writes down what it is asked to run."""
    tool = tmp_path / "venv" / "bin" / "python"
    tool.parent.mkdir(parents=True)
    cases = "".join(f"*{name}*) exit 1;;\n" for name in fails)
    tool.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase "$*" in\n{cases}esac\n')
    tool.chmod(0o755)
    tool.with_name("pip").symlink_to(tool)
    ready = tmp_path / "venv" / "ready"
    ready.touch()
    done = subprocess.run(
        ["make", "-C", str(ROOT), "-o", str(ready), "gpu-check", f"VENV={tmp_path / 'venv'}"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    installed, checked = (tmp_path / "asked").read_text().splitlines()
    assert installed.endswith("-e .[tensorrt]")
    assert checked == "-m perf.gpu_check -o gpu-check.json"
    assert (done.returncode != 0) is ("perf.gpu_check" in fails)
