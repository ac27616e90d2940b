"""Checks what each command connects to, listens on and loads as code, by tracing system calls.

Every command runs under `strace` in an isolated network, with its own home and temporary folder and
with `CI` unset (libraries report nothing if it is set).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from .recorded import VIT_SETS, read_case

TRACED = "connect,bind,sendto,execve,mmap"
IN_A_CI = ("CI", "GITHUB_ACTIONS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(shutil.which(tool) for tool in ("strace", "unshare", "ip"))
        or subprocess.run(["unshare", "-rn", "true"], check=False).returncode != 0,
        reason="needs strace, iproute2 and the right to make a network namespace",
    ),
]


@dataclass(frozen=True)
class Seen:
    """The connections, addresses and code of a command."""

    addresses: frozenset[str]
    """Internet addresses, as strace writes them, without 127.0.0.1."""
    listened: frozenset[str]
    code: frozenset[Path]
    """Files that the command mapped or started as code."""


@dataclass(frozen=True)
class Machine:
    """A home, a temporary folder and a working folder for commands."""

    folder: Path

    def run(self, *command: str | Path) -> Seen:
        """Runs a traced program; fails with its output unless it exits with 0."""
        log = self.folder / "trace.log"
        log.unlink(missing_ok=True)
        script = (
            'ip link set lo up; exec strace -f -qq --seccomp-bpf -y -s 200 -e "trace=$1" -o "$2" '
            '-- "${@:3}"'
        )
        (self.folder / "work").mkdir(exist_ok=True)
        done = subprocess.run(
            ["unshare", "-rn", "bash", "-c", script, "-", TRACED, log, *map(str, command)],
            cwd=self.folder / "work",
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return _seen(log.read_text(errors="replace"))

    def _environment(self) -> dict[str, str]:
        folders = {"HOME": "home", "TMPDIR": "tmp"}
        for name in folders.values():
            (self.folder / name).mkdir(exist_ok=True)
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("XDG_", "RAY_"))}
        return {n: v for n, v in kept.items() if n not in IN_A_CI} | {
            variable: str(self.folder / name) for variable, name in folders.items()
        }


def _seen(log: str) -> Seen:
    internet = {
        (call, address)
        for call, family in re.findall(r"\b(connect|bind|sendto)\((.*sa_family=AF_INET.*)", log)
        for address in re.findall(r"(?:inet_addr\(|inet_pton\(AF_INET6, )\"([^\"]*)\"", family)
        if address.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    }
    mapped = re.findall(r"mmap\([^\n]*PROT_EXEC[^\n]*?\d+<([^>]+)>", log)
    started = [
        path
        for path, result in re.findall(r"execve\(\"([^\"]*)\"[^\n]*= (-?\d+)", log)
        if int(result) == 0
    ]
    return Seen(
        addresses=frozenset(address for call, address in internet if call != "bind"),
        listened=frozenset(address for call, address in internet if call == "bind"),
        code=frozenset(Path(path) for path in (*mapped, *started) if path.startswith("/")),
    )


def _foreign(code: frozenset[Path], machine: Machine) -> list[Path]:
    """Returns code outside the packages, the system and the user's own cache."""
    own = [sys.prefix, sys.base_prefix, sysconfig.get_paths()["purelib"], "/usr", "/lib", "/bin"]
    own += ["/sbin", "/opt", "/lib64", str(machine.folder / "home/.cache/moexport")]
    roots = [Path(path).resolve() for path in own]
    return [
        path
        for path in sorted(code)
        if not any(path.resolve().is_relative_to(root) for root in roots)
    ]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def made(machine: Machine) -> Path:
    """Creates a checkpoint, labelled data, and bundles of both runtimes, without tracing."""
    case, work = read_case("soft_moe_vit"), machine.folder / "work"
    work.mkdir()
    shutil.copy(case.weights, work / "vit.pt")
    x = np.concatenate([case.x] * 8)
    label = np.concatenate([case.y().argmax(-1)] * 8)
    label[::4] = (label[::4] + 1) % 10  # an accuracy needs two classes
    np.savez(work / "data.npz", input=x, label=label)
    for target in ("onnx", "openvino"):
        command = ["export", "vit.pt", *VIT_SETS, "--k", "2", "--target", target, "-o", target]
        _moexport(work, *command)
    return work


def _moexport(work: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moexport", *arguments],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "vit.pt", *VIT_SETS),
    "export": ("export", "vit.pt", *VIT_SETS, "--k", "2", "-o", "new"),
    "export for OpenVINO": (
        *("export", "vit.pt", *VIT_SETS, "--k", "2", "--target", "openvino", "-o", "new-ov"),
    ),
    "export in INT8": (
        *("export", "vit.pt", *VIT_SETS, "--precision", "int8", "--target", "ort-cpu"),
        *("--data", "data.npz", "-o", "new-int8"),
    ),
    "verify": ("verify", "onnx"),
    "verify in OpenVINO": ("verify", "openvino"),
    "run": ("run", "onnx", "-i", "data.npz", "-o", "y.npz", "--force"),
    "run in OpenVINO": ("run", "openvino", "-i", "data.npz", "-o", "y.npz", "--force"),
    "bench": (
        *("bench", "vit.pt", *VIT_SETS, "--data", "data.npz", "--k", "8,2", "--batch", "1"),
        *("--engine", "pytorch-eager,pytorch-compile,onnxruntime,openvino", "--rounds", "5"),
        *("-o", "bench"),
    ),
    "tune": (*("tune", "vit.pt", *VIT_SETS, "--data", "data.npz", "--keep", "50%", "-o", "tuned"),),
    "specialise": ("specialise", "vit.pt", *VIT_SETS, "--data", "data.npz", "-o", "experts"),
    "triton": ("triton", "onnx", "-o", "repository"),
    "demo": ("demo", "-o", "demo"),
    "doctor": ("doctor",),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_connects_to_nobody_and_loads_no_code_of_others(
    name: str, machine: Machine, made: Path
) -> None:
    assert made.is_dir()
    seen = machine.run(sys.executable, "-m", "moexport", *COMMANDS[name])
    assert not seen.addresses
    assert not seen.listened
    assert not _foreign(seen.code, machine)


def test_a_cluster_for_one_run_listens_on_loopback_only(machine: Machine, made: Path) -> None:
    seen = machine.run(
        *(sys.executable, "-m", "moexport", "bench", "vit.pt", *VIT_SETS, "--data", "data.npz"),
        *("--k", "8,2", "--ray", "local", "--on", "CPU", "--engine", "onnxruntime"),
        *("--rounds", "5", "-o", "on-ray"),
    )
    assert (made / "on-ray" / "results.json").is_file()
    assert not seen.listened
    assert not seen.addresses
    assert not _foreign(seen.code, machine)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import socket; socket.socket().connect_ex(('192.0.2.1', 80))", "addresses"),
        ("import socket; socket.socket().bind(('0.0.0.0', 0))", "listened"),
        (
            "import ctypes, shutil, glob; shutil.copy(glob.glob('/usr/lib/*/libm.so.6')[0], "
            "'own.so'); ctypes.CDLL('./own.so')",
            "code",
        ),
    ],
)
def test_the_trace_sees_what_a_program_does(program: str, expected: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    seen = machine.run(sys.executable, "-c", program)
    found = {
        "addresses": seen.addresses,
        "listened": seen.listened,
        "code": _foreign(seen.code, machine),
    }
    assert {name for name, values in found.items() if values} == {expected}
