"""`moexport build` and `export`: options, reuse and refusals; engines are compiled for real."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moexport.common.onnx_runtime import ort
from moexport.errors import UsageError
from moexport.exporter.bundle.manifest import digest
from moexport.exporter.session import PROVIDERS
from moexport.exporter.tensorrt.backends import TENSORRT, first_gpu
from moexport.exporter.tensorrt.build import WORKER
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.tests.command import PROGRAM, run, run_program, start
from moexport.tests.exporter.tensorrt.engines import (
    CARD,
    build,
    export,
    leftovers,
    needs_rtx,
    refused,
)
from moexport.tests.recorded import DATA, read_case

LAYER = "soft_moe_fkodom"  # one MoE layer of 6 experts: the fastest to compile
SIZES = ("--profile", "batch=1:2:4,tokens=4:8:16")

without_gpu = pytest.mark.skipif(first_gpu() is not None, reason="says what is so without a GPU")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one layer without engines; do not write."""
    return export(LAYER, tmp_path_factory.mktemp("layer"), "--k", "input", "--lowering", "gather")


@pytest.fixture(scope="module")
def built(layer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an engine; do not write."""
    if needs_rtx.args[0]:
        pytest.skip(needs_rtx.kwargs["reason"])
    bundle = Path(shutil.copytree(layer, tmp_path_factory.mktemp("built") / "out"))
    build(bundle, *SIZES)
    return bundle


@pytest.fixture
def bundle(layer: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(layer, tmp_path / "bundle"))


@pytest.fixture
def with_engine(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "built"))


def edit_record(bundle: Path, **changes: Any) -> None:
    path = bundle / "manifest.json"
    content = json.loads(path.read_text())
    content["engines"][0] |= changes
    path.write_text(json.dumps(content | {"sha256": digest(content)}))


def run_engine(bundle: Path, *options: str, engine: str = "tensorrt-rtx") -> Any:
    folder = bundle.parent
    np.savez(folder / "x.npz", input=read_case(LAYER).x)
    files = ("-i", folder / "x.npz", "-o", folder / "y.npz")
    outcome = run("run", bundle, *files, "--engine", engine, "--k", "2", *options)
    assert not (folder / "y.npz").exists()
    return outcome


def worker_of(process: subprocess.Popen[str]) -> Path:
    """Where Linux shows the process that compiles for a command; waits until there is one."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        for number in children.read_text().split():
            found = Path("/proc") / number
            with contextlib.suppress(FileNotFoundError):  # another child, which has ended
                if WORKER in (found / "cmdline").read_text():
                    return found
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@needs_rtx
def test_an_export_ends_with_an_engine_in_a_bundle_that_verifies(tmp_path: Path) -> None:
    case = read_case(LAYER)
    outcome = run(
        *("export", case.weights, "--set", "version=0.2.0", "-o", tmp_path / "out", "--k", "2"),
        *("--target", "tensorrt-rtx", *CARD, *SIZES, "--optimization-level", "1", "--json"),
    )
    assert outcome.code == 0, outcome.err
    assert "compiling engine-tensorrt-rtx.plan with TensorRT-RTX" in outcome.err
    (engine,) = json.loads(outcome.out)["engines"]
    assert engine["settings"]["optimization_level"] == 1
    assert engine["precision"].keys() == {"fp32"}
    assert engine["peak_memory_bytes"] > 0
    verified = run("verify", tmp_path / "out", "--json")
    assert verified.code == 0, verified.out
    checks = {check["name"] for check in json.loads(verified.out)["checks"]}
    assert {"hash of engine-tensorrt-rtx.plan"} <= checks
    assert leftovers(tmp_path) == []


@needs_rtx
def test_several_profiles_are_all_in_the_engine(bundle: Path, built: Path) -> None:
    profiles = ("--profile", "batch=1,k=2", "--profile", "batch=2:8:16,k=1:3:6")
    (record,) = build(bundle, *profiles)
    assert record["settings"]["profiles"] == 2
    assert [each["k"] for each in record["profiles"]] == [[2, 2, 2], [1, 3, 6]]
    one = (built / "engine-tensorrt-rtx.plan").stat().st_size
    assert (bundle / record["file"]).stat().st_size > 1.3 * one


@needs_rtx
def test_the_same_request_gives_the_same_file_without_a_rebuild(
    with_engine: Path, tmp_path: Path
) -> None:
    plan = with_engine / "engine-tensorrt-rtx.plan"
    before = plan.stat().st_mtime_ns
    again = run("build", with_engine, *CARD, *SIZES)
    assert again.code == 0, again.err
    assert "already there" in again.out
    assert plan.stat().st_mtime_ns == before
    cache = ("--engine-cache", tmp_path / "cache")
    first = run("build", with_engine, *CARD, *SIZES, "--force", *cache)
    assert "built in" in first.out
    first_plan = plan.read_bytes()
    plan.write_bytes(b"damaged")
    second = run("build", with_engine, *CARD, *SIZES, *cache)
    assert "taken from the cache" in second.out
    assert "compiling" not in second.err
    assert plan.read_bytes() == first_plan
    other = run("build", with_engine, *CARD, *SIZES, "--tf32", *cache)
    assert "built in" in other.out
    record = json.loads((with_engine / "manifest.json").read_text())["engines"]
    assert [each["settings"]["tf32"] for each in record] == [True]


@needs_rtx
def test_inspect_shows_layers_precisions_and_profiles(built: Path, tmp_path: Path) -> None:
    plan = built / "engine-tensorrt-rtx.plan"
    outcome = run("inspect", plan)
    assert outcome.code == 0, outcome.err
    for text in ("built by    tensorrt-rtx", "profile     input 1:2:4×4:8:16×24, k 1:1:6", "8.9"):
        assert text in outcome.out
    assert any("/experts/" in line and "fp32" in line for line in outcome.out.splitlines())
    facts = json.loads(run("inspect", plan, "--json").out)
    assert facts["bytes"] == plan.stat().st_size
    alone = tmp_path / "alone.plan"
    shutil.copy(plan, alone)
    unknown = run("inspect", alone)
    assert unknown.code == 1
    assert "no manifest next to it lists this engine" in unknown.error
    assert "--trust-engine" in unknown.hint
    trusted = json.loads(run("inspect", alone, "--trust-engine", "--json").out)
    assert trusted["version"] == facts["version"]
    alone.write_bytes(alone.read_bytes()[:-1])  # the plan begins with its size
    cut = run("inspect", alone, "--trust-engine")
    assert f"truncated: {facts['bytes'] - 1} of {facts['bytes']} bytes" in cut.error


@needs_rtx
def test_a_dry_run_says_what_would_be_built(bundle: Path) -> None:
    outcome = run("build", bundle, *CARD, *SIZES, "--dry-run")
    assert outcome.code == 0, outcome.err
    assert "engine-tensorrt-rtx.plan from model.onnx, TensorRT-RTX" in outcome.out
    assert "profile input 1:2:4×4:8:16×24, k 1:1:6" in outcome.out
    assert not list(bundle.glob("*.plan"))


@needs_rtx
@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--timing-cache", "t"), "TensorRT-RTX does not support it: it times no kernels", "leave"),
        (("--version-compatible",), "its engines run only in the version that built them", "leave"),
        (
            ("--hardware-compatible", "ampere-plus"),
            "--compute-capability selects the GPUs",
            "leave",
        ),
        (("--optimization-level", "9"), "TensorRT-RTX has levels 0 to 5", "3 is its default"),
        (("--workspace", "lots"), "--workspace lots: not a number of bytes", "2GiB"),
        (("--compute-capability", "9.0"), "9.0: TensorRT-RTX compiles for", "use TensorRT there"),
        (("--compute-capability", "8.9,8.9"), "has duplicates", "once"),
        (
            ("--compute-capability", "current,8.9"),
            "current cannot be combined",
            "give compute capabilities",
        ),
        (("--profile", "rows=1"), "--profile rows=1: expected AXIS", "axes: batch, tokens"),
        (("--profile", "k=1:2:7"), "--profile k=1:2:7: k is at most 6", "covers every k"),
        (("--graph", "dense"), "has no graph 'dense'", "it has model.onnx"),
        (("--profile", "batch=1", "--profile", "batch=1"), "are the same", "give each once"),
        (
            ("--batch", "1:2:4", "--profile", "batch=1"),
            "--batch 1:2:4: every --profile already names batch",
            "leave --batch out",
        ),
        (
            ("--target", "onnx"),
            "--target onnx: engines are built for tensorrt",
            "without an engine",
        ),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused_before_the_build(
    options: tuple[str, ...], message: str, hint: str, bundle: Path
) -> None:
    outcome = refused(bundle, *options)
    assert outcome.code == 2
    assert message in outcome.error
    assert hint in outcome.hint
    assert "compiling" not in outcome.err


@needs_rtx
def test_an_engine_cache_that_cannot_be_made_is_refused(bundle: Path) -> None:
    outcome = refused(bundle, *CARD, "--engine-cache", bundle / "model.onnx" / "engines")
    assert "not a folder" in outcome.error
    assert outcome.hint == "choose another --engine-cache"
    assert "compiling" not in outcome.err


def test_a_timing_cache_that_cannot_be_written_is_refused_before_the_build(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "no" / "kernels.cache"):
        with pytest.raises(UsageError, match=r"--timing-cache .* cannot be written"):
            EngineOptions(timing_cache=file).check(TENSORRT)
    EngineOptions(timing_cache=tmp_path / "kernels.cache").check(TENSORRT)


@needs_rtx
@without_gpu
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compute-capability", "current"), "there is no NVIDIA GPU here"),
        (("--strip-plan",), "compiles engines without weights only with an NVIDIA GPU"),
        (("--weight-streaming", "much"), "--weight-streaming much: not a number of bytes"),
    ],
)
def test_what_needs_a_gpu_to_build_says_so(
    options: tuple[str, ...], message: str, bundle: Path
) -> None:
    assert message in refused(bundle, *options).error


@needs_rtx
@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--workspace", "1KiB", *CARD), "the workspace is too small", "raise --workspace"),
        (
            ("--compute-capability", "7.5"),
            "this graph does not compile for compute capability 7.5",
            "a router computes in FP32 in every precision",
        ),
    ],
)
def test_a_build_that_fails_leaves_the_bundle_and_says_what_to_do(
    options: tuple[str, ...], message: str, hint: str, bundle: Path
) -> None:
    outcome = refused(bundle, *options, *SIZES)
    assert message in outcome.error
    assert hint in outcome.hint


@pytest.mark.slow
@needs_rtx
@pytest.mark.skipif(sys.platform != "linux", reason="reads the processes as Linux shows them")
def test_a_build_that_the_system_kills_for_memory_says_what_to_lower(bundle: Path) -> None:
    process = start("build", bundle, *CARD, *SIZES)
    worker = worker_of(process)
    os.kill(int(worker.name), signal.SIGKILL)  # what the kernel does to a process without memory
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the system killed the build, as it does when memory runs out (this machine has" in err
    assert "hint: a build needs about three times the weights (" in err
    assert leftovers(bundle) == []
    assert not list(bundle.glob("*.plan"))


@pytest.mark.slow
@needs_rtx
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_build_that_runs_out_of_memory_says_what_to_lower(bundle: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    command = shlex.join([*PROGRAM, "build", str(bundle), *CARD, *SIZES])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 550000; exec {command}"],  # kB; it takes about 750,000
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "memory ran out" in done.stderr
    assert "hint: a build needs about three times the weights (" in done.stderr
    assert "--precision fp16" in done.stderr
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing_behind(number: signal.Signals, bundle: Path) -> None:
    before = sorted(path.name for path in bundle.iterdir())
    process = start("build", bundle, *CARD, "--optimization-level", "5")
    assert process.stderr is not None
    while "compiling" not in process.stderr.readline():
        assert process.poll() is None
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; no partial files remain" in err
    assert sorted(path.name for path in bundle.iterdir()) == before


@pytest.mark.slow
@needs_rtx
@pytest.mark.skipif(sys.platform != "linux", reason="reads the processes as Linux shows them")
def test_an_interrupt_while_the_builder_is_at_work_ends_both_processes(
    bundle: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    kept = tmp_path / "engines"
    profiles = (*SIZES, "--profile", "batch=8", "--engine-cache", kept)
    process = start("build", bundle, *CARD, *profiles)
    worker = worker_of(process)
    while "libtensorrt_onnxparser" not in (worker / "maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)  # a fifth of what compiling takes
    assert worker.is_dir()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; no partial files remain" in err
    assert not worker.exists()
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    assert not kept.exists()


KILLED = """
import os, signal, sys
from moexport.__main__ import main

def kill(event, given):
    if event == "shutil.rmtree" and "moexport-build" in str(given[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
main()
"""


@pytest.mark.slow
@needs_rtx
@pytest.mark.skipif(sys.platform == "win32", reason="kills as Unix does")
def test_what_a_killed_build_left_is_removed_by_the_next_after_a_day(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("MOEXPORT_ENGINE_CACHE", "off")
    build_it = ("build", bundle, *CARD, *SIZES)
    program = [sys.executable, "-c", KILLED, *map(str, build_it)]
    done = subprocess.run(program, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [*bundle.glob(".engines.*.partial"), *temporary.glob(".moexport-build.*.partial")]
    assert len(left) == 2
    for each in [file for folder in left for file in (*folder.rglob("*"), folder)]:
        os.utime(each, (0, 0))
    outcome = run_program(*build_it)
    assert outcome.code == 0, outcome.err
    assert not [each for each in left if each.exists()]
    assert leftovers(bundle) == leftovers(temporary) == []


def test_without_tensorrt_the_install_command_is_told(bundle: Path) -> None:
    if (shutil.which("trtexec") or first_gpu()) is not None:
        pytest.skip("TensorRT may be installed here")
    outcome = refused(bundle, "--target", "tensorrt")
    assert outcome.error == "TensorRT is not installed"
    index = "--extra-index-url https://pypi.nvidia.com"
    assert outcome.hint == f"pip install {index} '.[tensorrt]' in a clone of moexport"


@without_gpu
def test_an_export_for_a_server_is_written_and_says_where_its_engine_is_built(
    tmp_path: Path,
) -> None:
    weights = DATA / LAYER / "weights.pt"
    base = ("export", weights, "--set", "version=0.2.0", "-o", tmp_path / "out", "--k", "2")
    outcome = run(*base, "--target", "tensorrt", "--no-verify")
    assert outcome.code == 0
    assert "note: no engine was built: TensorRT is not installed" in outcome.err
    insisted = run(*base, "--target", "tensorrt", "--engine", "--force")
    assert (insisted.code, insisted.error) == (1, "TensorRT is not installed")
    wrong = run(*base, "--target", "onnx", "--workspace", "2GiB", "--force")
    assert wrong.code == 2
    assert wrong.error == "--workspace: --target onnx has no engines"


@needs_rtx
@without_gpu
def test_running_an_engine_without_a_gpu_says_so(with_engine: Path) -> None:
    outcome = run_engine(with_engine)
    assert outcome.code == 1
    assert "there is no NVIDIA GPU here, or its driver is older" in outcome.error
    assert "moexport doctor" in outcome.hint


@needs_rtx
def test_an_engine_of_another_version_is_told_apart_from_a_damaged_one(with_engine: Path) -> None:
    edit_record(with_engine, version="1.6.0.1")
    outcome = run_engine(with_engine)
    assert outcome.code == 1
    assert "built by TensorRT-RTX 1.6.0.1, but 1.7" in outcome.error
    assert "build it again here" in outcome.hint


@needs_rtx
@pytest.mark.parametrize("left", [0, 10, 1000])
def test_a_truncated_engine_is_not_loaded(left: int, with_engine: Path) -> None:
    plan = with_engine / "engine-tensorrt-rtx.plan"
    whole = plan.read_bytes()
    plan.write_bytes(whole[:left])
    outcome = run_engine(with_engine)
    assert f"truncated: {left} of {len(whole)} bytes" in outcome.error
    if left == 1000:
        assert run("verify", with_engine).code == 3


@needs_rtx
def test_an_engine_of_the_other_backend_is_told_by_its_first_bytes(with_engine: Path) -> None:
    edit_record(with_engine, flavour="tensorrt")
    outcome = run_engine(with_engine, "--trust-engine", engine="tensorrt")
    assert "an engine of TensorRT-RTX, but manifest.json lists one of TensorRT" in outcome.error
    assert outcome.hint.endswith("--target tensorrt`")


@needs_rtx
def test_a_lost_list_of_layers_is_built_again(with_engine: Path) -> None:
    layers = with_engine / "engine-tensorrt-rtx.layers.json"
    layers.unlink()
    lost = run("inspect", with_engine / "engine-tensorrt-rtx.plan")
    assert lost.code == 1
    assert lost.hint == "build the engine again"
    assert "built in" in run("build", with_engine, *CARD, *SIZES).out
    assert layers.is_file()


@needs_rtx
def test_an_engine_that_was_exchanged_is_not_loaded_unless_it_is_trusted(with_engine: Path) -> None:
    plan = with_engine / "engine-tensorrt-rtx.plan"
    content = bytearray(plan.read_bytes())
    content[-1] ^= 1
    plan.write_bytes(content)
    outcome = run_engine(with_engine)
    assert "not the engine in manifest.json (SHA-256 differs)" in outcome.error
    assert "--trust-engine" in outcome.hint
    assert "--trust-engine" in run("verify", with_engine).error
    if first_gpu() is None:
        assert "there is no NVIDIA GPU" in run_engine(with_engine, "--trust-engine").error


@needs_rtx
def test_a_bundle_without_that_engine_says_how_to_build_it(with_engine: Path) -> None:
    outcome = run_engine(with_engine, engine="tensorrt")
    assert "has no tensorrt engine of model.onnx" in outcome.error
    assert f"moexport build {with_engine} --target tensorrt" in outcome.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine=tensorrt-rtx", "--provider=cuda"), "--provider: it belongs to ONNX Runtime"),
        (("--engine=tensorrt-rtx", "--threads=2"), "--threads: it belongs to ONNX Runtime"),
        (("--trust-engine",), "--trust-engine: no engine is loaded"),
    ],
)
def test_options_of_another_runner_are_refused(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    outcome = run("run", tmp_path, "-i", "x.npz", "-o", tmp_path / "y.npz", *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.error


@without_gpu
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_onnx_runtime_does_not_fall_back_to_the_cpu(
    provider: str, layer: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=read_case(LAYER).x)
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    outcome = run("run", layer, *files, "--k", "2", "--provider", provider)
    # The package for CPUs alone has no such provider; that with CUDA has one and finds no GPU.
    if PROVIDERS[provider] in ort.get_available_providers():
        assert outcome.code == 1
        assert "ExecutionProvider: there is no NVIDIA GPU here" in outcome.error
    else:
        assert outcome.code == 2
        assert f"ONNX Runtime has no {PROVIDERS[provider]} on this machine" in outcome.error
        assert "pip install '.[gpu]'" in outcome.hint
    assert not (tmp_path / "y.npz").exists()
