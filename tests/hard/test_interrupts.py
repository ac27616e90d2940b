"""Signals end a command while a library computes, too."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from moexport.tests.recorded import read_case
from onnx import TensorProto, helper

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals as Unix does")

FOREVER = 2**62


def never_ends(bundle: Path) -> None:
    """Makes a bundle's graph loop before it gives its output: 4 kB, and ages of computing."""
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    graph, output = model.graph, model.graph.output[0].name
    for node in graph.node:
        node.output[:] = ["y/once" if name == output else name for name in node.output]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Mul", ["s", "s"], ["t"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, [1]),
        ],
    )
    graph.initializer.extend(
        [
            helper.make_tensor("times", TensorProto.INT64, [], [FOREVER]),
            helper.make_tensor("true", TensorProto.BOOL, [], [True]),
            helper.make_tensor("zero/axis", TensorProto.INT64, [1], [0]),
        ]
    )
    # What it multiplies comes from the input, so that no optimiser computes it before.
    graph.node.extend(
        [
            helper.make_node("ReduceSum", ["y/once"], ["y/sum"], keepdims=0),
            helper.make_node("Unsqueeze", ["y/sum", "zero/axis"], ["y/start"]),
            helper.make_node("Loop", ["times", "true", "y/start"], ["y/end"], body=body),
            helper.make_node("Add", ["y/once", "y/end"], [output]),
        ]
    )
    onnx.save(model, bundle / "model.onnx")


COMPUTES = """
import sys
from moexport.common import interrupts
interrupts.GRACE_S = float(sys.argv.pop(1))
from moexport.__main__ import main
main()
"""


def sent_to(
    process: subprocess.Popen[str], number: signal.Signals, signals: int
) -> tuple[str, float]:
    """Sends a program signals; returns what it said, and after how long it had ended.

    A busy machine may deliver the first late, and one that follows it at once is no second one.
    """
    sent = time.monotonic()
    for left in reversed(range(signals)):
        process.send_signal(number)
        if left:
            time.sleep(1.0)
    _, err = process.communicate(timeout=50)
    return err, time.monotonic() - sent


@pytest.mark.parametrize(("signals", "grace_s"), [(1, 2.0), (2, 60.0)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_long_computation_is_interrupted_with_code_130(
    number: signal.Signals, signals: int, grace_s: float, bundle: Path, tmp_path: Path
) -> None:
    never_ends(bundle)
    np.savez(tmp_path / "x.npz", input=read_case("soft_moe_vit").x)
    asked = ("run", bundle, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--no-check")
    program = [sys.executable, "-c", COMPUTES, str(grace_s), *map(str, asked)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until_it_computes(process)
    err, took = sent_to(process, number, signals)
    assert process.returncode == 130
    assert took > grace_s if signals == 1 else took < grace_s  # the second signal does not wait
    assert err.splitlines()[-1] == "error: interrupted; no partial files remain"
    assert not (tmp_path / "y.npz").exists()


def wait_until_it_computes(process: subprocess.Popen[str]) -> None:
    """Waits until `run` is within the graph: it has said so, and took a processor's time since."""
    assert process.stderr is not None
    while "running bundle" not in process.stderr.readline():
        assert process.poll() is None
    running = psutil.Process(process.pid)
    before = running.cpu_times().user
    while running.cpu_times().user < before + 1.0:
        assert process.poll() is None
        time.sleep(0.05)


CLEANS_UP = """
import os, time
from moexport.common.interrupts import GRACE_S, interrupts
try:
    with interrupts(lambda: os._exit(9)):
        try:
            print("computes", flush=True)
            while True:
                pass
        finally:
            time.sleep(GRACE_S + 1)
            print("cleaned up", flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_what_is_cleaned_up_after_an_interrupt_may_take_its_time() -> None:
    process = subprocess.Popen([sys.executable, "-c", CLEANS_UP], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "computes\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out.splitlines() == ["cleaned up", "interrupted"]
    assert process.returncode == 0


HOLDS_THE_LOCK = """
import ctypes, sys
from moexport.common import interrupts
locks, interrupts.GRACE_S = int(sys.argv[1]), float(sys.argv[2])
with interrupts.interrupts(lambda: None):
    interrupts.supervise()
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    print("computing", flush=True)
    for _ in range(locks):  # locked twice, it waits for ever, whatever signal comes
        library.pthread_mutex_lock(mutex)
    sys.exit(7)
"""


def holding_the_lock(grace_s: float) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A supervised program whose child waits within a library, and that child.

    The child waits for the lock when it sleeps, and the program for signals when it does.
    """
    program = [sys.executable, "-c", HOLDS_THE_LOCK, "2", str(grace_s)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "computing\n"
    parent = psutil.Process(process.pid)
    (child,) = parent.children()
    for each in (child, parent):
        while each.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
    return process, child


@pytest.mark.skipif(sys.platform != "linux", reason="needs a kernel that ends orphans")
@pytest.mark.parametrize(("signals", "grace_s"), [(1, 2.0), (2, 60.0)])
def test_a_library_that_holds_pythons_lock_is_ended_from_outside(
    signals: int, grace_s: float
) -> None:
    process, child = holding_the_lock(grace_s)
    err, took = sent_to(process, signal.SIGTERM, signals)
    assert process.returncode == 130
    assert took > grace_s if signals == 1 else took < grace_s  # the second signal does not wait
    assert err == "error: interrupted while a library was computing\n"
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="needs a kernel that ends orphans")
def test_a_supervised_command_ends_as_its_child_does_and_dies_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS_THE_LOCK, "0", "2"], check=False)
    assert done.returncode == 7
    process, child = holding_the_lock(grace_s=2)
    process.kill()
    process.wait(10)
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone
