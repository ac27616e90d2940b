"""A GPU that a backend does not serve is told, with what to use there instead."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from moexport.bench.engines import requirements
from moexport.errors import EngineError, ForeignEngineError
from moexport.exporter.tensorrt.backends import TENSORRT, TENSORRT_RTX, Backend, Gpu, first_gpu
from moexport.exporter.tensorrt.plan_file import check_runs_here, reason_of
from moexport.exporter.tensorrt.trust import find_plan
from moexport.tests.command import Outcome, run, run_program
from moexport.tests.exporter.tensorrt.engines import build, export, needs_rtx

H100 = Gpu("NVIDIA H100 80GB HBM3", "9.0", "580.65.06")
V100 = Gpu("Tesla V100-SXM2-16GB", "7.0", "580.65.06")
ADA = Gpu("NVIDIA GeForce RTX 4090", "8.9", "580.65.06")

without_gpu = pytest.mark.skipif(first_gpu() is not None, reason="puts another GPU in its place")


@needs_rtx
def test_the_cards_are_those_that_the_installed_builder_names() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    named = set(trt.ComputeCapability.__members__) - {"NONE", "CURRENT"}
    assert {f"SM{each.replace('.', '')}" for each in TENSORRT_RTX.cards} == named


@pytest.mark.parametrize(
    ("backend", "served", "not_served"),
    [
        (TENSORRT_RTX, "7.5 8.0 8.6 8.9 12.0 12.1", "6.1 7.0 8.7 9.0 10.0 10.3 11.0"),
        (TENSORRT, "7.5 8.0 8.9 9.0 10.0 12.0", "6.1 7.0"),
    ],
    ids=["tensorrt-rtx", "tensorrt"],
)
def test_each_backend_serves_its_own_gpus(backend: Backend, served: str, not_served: str) -> None:
    assert all(backend.serves(each) for each in served.split())
    assert not any(backend.serves(each) for each in not_served.split())


def test_the_refusal_names_the_gpu_and_the_way_out() -> None:
    TENSORRT_RTX.check_serves(ADA)
    TENSORRT.check_serves(H100)
    with pytest.raises(ForeignEngineError) as found:
        TENSORRT_RTX.check_serves(H100)
    assert "does not support NVIDIA H100 80GB HBM3 (compute capability 9.0)" in found.value.message
    assert "8.9 (RTX 40 series)" in found.value.message
    brings = "" if TENSORRT.installed() else f", installed with {TENSORRT.install}"
    assert found.value.hint == (
        f"use TensorRT there (--target tensorrt){brings}, or run the graph in ONNX Runtime "
        "(--provider cuda)"
    )
    with pytest.raises(EngineError, match=r"it supports compute capability 7\.5 and newer") as old:
        TENSORRT.check_serves(V100, EngineError)
    assert old.value.hint is not None
    assert old.value.hint.startswith("run the graph in ONNX Runtime there")


@needs_rtx
@without_gpu
def test_an_engine_of_another_tensorrt_says_how_to_have_that_one(bundle: Path) -> None:
    plan = find_plan(bundle / "engine-tensorrt-rtx.plan")
    assert plan.record is not None
    check_runs_here(plan)
    with pytest.raises(ForeignEngineError, match=r"built by TensorRT-RTX 1\.6\.1\.120") as found:
        check_runs_here(replace(plan, record=replace(plan.record, version="1.6.1.120")))
    assert found.value.hint is not None
    assert f"moexport build {bundle}" in found.value.hint
    assert "pip install 'tensorrt-rtx-cu13==1.6.1.120'" in found.value.hint
    assert TENSORRT.install_version("==10.16.1.11").startswith("pip install --extra-index-url ")


@needs_rtx
def test_a_driver_that_is_too_old_for_an_engine_is_told_with_what_it_needs() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    flags = trt.EngineInvalidityDiagnostics
    reason = reason_of(trt, int(flags.OLD_CUDA_DRIVER))
    assert reason is not None and reason.foreign
    assert reason.meaning == "the NVIDIA driver is too old for it"
    assert "driver 580 or newer" in reason.hint
    assert "'cuda-bindings>=12,<13' and tensorrt-cu12 or tensorrt-rtx-cu12" in reason.hint


@needs_rtx
@pytest.mark.parametrize(("gpu", "runs"), [(H100, False), (V100, False), (ADA, True)], ids=str)
def test_doctor_tells_whether_the_gpu_is_served(gpu: Gpu, runs: bool) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    found = {each.name: each.ability(gpu) for each in requirements()}
    running = found["run TensorRT-RTX engines"]
    assert running.available == runs
    assert f"{gpu.name} (compute capability {gpu.compute_capability})" in running.detail or runs
    assert found["build TensorRT-RTX engines"].available  # for other machines


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with an engine for 8.9; do not write."""
    if not TENSORRT_RTX.installed():
        pytest.skip(f"{TENSORRT_RTX.title} is not installed: {TENSORRT_RTX.install}")
    folder = tmp_path_factory.mktemp("served")
    bundle = export("soft_moe_fkodom", folder, "--k", "2", "--lowering", "gather")
    build(bundle, "--profile", "batch=1,tokens=4")
    return bundle


def on(gpu: Gpu, folder: Path, *arguments: str | Path) -> Outcome:
    """The outcome of a command on a machine whose driver's tool tells of this GPU."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho '{gpu.name}, {gpu.compute_capability}, {gpu.driver}'\n")
    tool.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join((str(tool.parent), os.environ["PATH"])))
        return run_program(*arguments)


@without_gpu
def test_a_build_for_a_gpu_that_is_not_served_is_refused(bundle: Path, tmp_path: Path) -> None:
    outcome = on(H100, tmp_path, "build", bundle, "--compute-capability", "current")
    assert (outcome.code, outcome.out) == (2, "")
    assert "TensorRT-RTX does not support NVIDIA H100 80GB HBM3" in outcome.error
    assert "--target tensorrt" in outcome.hint


@without_gpu
@pytest.mark.parametrize(
    ("gpu", "message", "hint"),
    [
        (H100, "TensorRT-RTX does not support NVIDIA H100", "--target tensorrt"),
        (
            Gpu("NVIDIA GeForce RTX 5090", "12.0", "580.65.06"),
            "built for cards of compute capability 8.9, but this machine has NVIDIA GeForce RTX",
            "--compute-capability builds an engine for several GPUs",
        ),
    ],
    ids=["not served", "another card"],
)
def test_an_engine_is_not_run_on_another_gpu(
    gpu: Gpu, message: str, hint: str, bundle: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=np.zeros((1, 4, 24), np.float32))
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    outcome = on(gpu, tmp_path, "run", bundle, *files, "--engine", "tensorrt-rtx")
    assert outcome.code == 1
    assert message in outcome.error
    assert hint in outcome.hint
    assert not (tmp_path / "y.npz").exists()


def test_a_capability_that_only_the_other_backend_serves_says_so(bundle: Path) -> None:
    outcome = run("build", bundle, "--compute-capability", "9.0")
    assert outcome.code == 2
    assert "--compute-capability 9.0: TensorRT-RTX compiles for compute" in outcome.error
    assert "use TensorRT there (--target tensorrt)" in outcome.hint
    assert run("build", bundle, "--compute-capability", "ada").hint == "for example 8.6,8.9,12.0"
