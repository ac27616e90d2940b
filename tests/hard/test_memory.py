"""Loading holds no second copy of the weights."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from moexport.common.files import release
from moexport.exporter.checkpoints import floats as widening
from moexport.tests.exporter.families.states import State, vit_state
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

STATUS = Path("/proc/self/status")
MEGABYTE = 2**20

# Anonymous memory is what a process allocated; pages of a mapped file are not in it.
MEASURE = """
import re, sys, threading
from pathlib import Path
from moexport.exporter.checkpoints.load import load

SAID = {"num_heads": 4, "rest": "default"}

def allocated():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    while not done.wait(0.001):
        seen.append(allocated())

load(sys.argv[1], config=SAID)  # what libraries allocate once
before, done = allocated(), threading.Event()
seen = [before]
watcher = threading.Thread(target=watch)
watcher.start()
model = load(sys.argv[2], config=SAID)
done.set()
watcher.join()
print(max(*seen, allocated()) - before)
"""


def large_state() -> State:
    """About 200 MB, most of it in the experts."""
    return vit_state(d=64, heads=4, n=64, h=64, moe_h=6200)


def stacked(state: State) -> State:
    prefix, n = "blocks.1.mlp.", 64
    result = {key: t for key, t in state.items() if ".experts." not in key}
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        experts = [state[f"{prefix}experts.{i}.{name}"] for i in range(n)]
        result[f"{prefix}stacked_expert_{name.replace('.', '_')}"] = torch.stack(experts)
    return result


INSPECT = """
import sys
from pathlib import Path
from moexport.exporter.inspect import inspect
from moexport.exporter.checkpoints.load import load

SAID = {"num_heads": 4, "rest": "default"}
model = load(sys.argv[1], config=SAID, values=False)
inspect(model)
resident, inside = 0, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    if "-" in line.partition(" ")[0]:
        inside = line.endswith(Path(sys.argv[1]).name)
    elif inside and line.startswith("Rss:"):
        resident += 1024 * int(line.split()[1])
print(resident)
"""


@pytest.mark.skipif(not STATUS.exists(), reason="reads /proc/self/smaps")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_inspecting_two_hundred_megabytes_reads_the_headers(tmp_path: Path, suffix: str) -> None:
    path, state = tmp_path / f"large{suffix}", large_state()
    if suffix == ".pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    command = [sys.executable, "-c", INSPECT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 * MEGABYTE


@pytest.mark.skipif(not STATUS.exists(), reason="reads /proc/self/status")
@pytest.mark.parametrize(
    "kind", ["separate.pt", "stacked.pt", "separate.safetensors", "half.pt", "half.safetensors"]
)
def test_loading_two_hundred_megabytes_allocates_a_few(tmp_path: Path, kind: str) -> None:
    small, large = tmp_path / f"small-{kind}", tmp_path / f"large-{kind}"
    half = kind.startswith("half")
    for path, whole in ((small, vit_state(d=16, heads=4)), (large, large_state())):
        state = stacked(whole) if kind == "stacked.pt" and path == large else whole
        if half:
            state = {key: tensor.bfloat16() for key, tensor in state.items()}
        if path.suffix == ".pt":
            torch.save(state, path)
        else:
            save_file(state, path)
    assert large.stat().st_size > 195 * MEGABYTE / (1 + half)
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 * MEGABYTE


def test_weights_of_sixteen_bits_are_widened_in_a_file_that_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    source = {
        "a": torch.randn(5, 3, generator=random).half(),
        "b": torch.randn(7, 4, generator=random).bfloat16().t(),
        "c": torch.tensor(2.5, dtype=torch.float64),
        "d": torch.zeros(0, 3, dtype=torch.float16),
    }
    monkeypatch.setattr(widening, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found, file = widening.upcast(source, ())
    assert file is not None
    assert file.parent == tmp_path
    assert not list(tmp_path.iterdir())
    release([file])  # its pages are read again from a file without a name
    in_memory = {key: tensor.float() for key, tensor in source.items()}
    torch.testing.assert_close(found, in_memory, rtol=0, atol=0)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    found, file = widening.upcast(source, ())
    assert file is None
    assert not list(tmp_path.iterdir())
    torch.testing.assert_close(found, in_memory, rtol=0, atol=0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    found, file = widening.upcast(source, ())
    assert file is None
    torch.testing.assert_close(found, in_memory, rtol=0, atol=0)


EXPORT = """
import sys, threading, time
from pathlib import Path
from moexport.exporter import reference
from moexport.tests.command import run

reference.EXACT_BYTES = 0  # as of larger weights
def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(l.split()[1]) for l in lines if l.startswith(("RssAnon", "RssFile")))

def watch():
    while not done.wait(0.005):
        seen.append(resident())

def export(weights, out):
    options = ("--set", "version=0.2", "--tokens", "8", "--threads", "1")
    outcome = run("export", weights, "-o", out, *options, *sys.argv[3:])
    assert outcome.code == 0, outcome.err

export(sys.argv[1], "small")  # what libraries allocate once
before, done = resident(), threading.Event()
seen = [before]
watcher = threading.Thread(target=watch)
watcher.start()
export(sys.argv[2], "large")
done.set()
watcher.join()
print(max(seen) - before)
"""


def layer_file(path: Path, d: int) -> Path:
    made = torch.Generator().manual_seed(0)
    sizes = {"phi": (d, 64, 1), "experts.weight": (64, d, d), "experts.bias": (64, d)}
    torch.save({k: torch.randn(s, generator=made) * d**-0.5 for k, s in sizes.items()}, path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        ("--target", "ort-cpu", "--precision", "fp16", "--k", "4"),
        ("--target", "onnx", "--k", "n"),
        ("--target", "tensorrt", "--no-engine", "--precision", "bf16", "--k", "4"),
    ],
    ids=["fp16", "fp32", "bf16 that copies experts"],
)
def test_an_export_takes_no_more_than_one_and_a_half_times_the_weights(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    small, large = layer_file(tmp_path / "small.pt", 64), layer_file(tmp_path / "large.pt", 1024)
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, str(small), str(large), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.5 * large.stat().st_size
