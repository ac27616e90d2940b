"""Other CPUs by qemu's user mode: what they compute, not how fast.

A program runs on an x86 CPU without some instructions as it is; on ARM it needs a Python, ONNX
Runtime and what else moexport needs to run bundles, which Debian's and pip's packages for ARM
give.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU as qemu names it, where it is found, and its instructions as Linux lists them."""

    model: str
    where: str
    instructions: str
    part: str = ""

    @property
    def architecture(self) -> str:
        """What Linux calls it, and qemu's program for it."""
        return "aarch64" if self.part else "x86_64"


_ARMV8 = "fp asimd aes pmull sha1 sha2 crc32 cpuid"
_ARMV8_2 = "fp asimd aes pmull sha1 sha2 crc32 cpuid atomics fphp asimdhp asimdrdm lrcpc asimddp"
_SSE42 = "fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt"

CPUS = {
    cpu.model: cpu
    for cpu in (
        Cpu("Nehalem", "x86 with SSE4.2", _SSE42),
        Cpu("Haswell", "x86 with AVX2, without VNNI", f"{_SSE42} avx f16c fma avx2 bmi2"),
        Cpu("cortex-a53", "ARMv8.0: Raspberry Pi 3 and 4", _ARMV8, part="0xd03"),
        Cpu("cortex-a76", "ARMv8.2: Raspberry Pi 5, Orin, Graviton2", _ARMV8_2, part="0xd0b"),
        Cpu("max", "ARM with all that qemu has", f"{_ARMV8_2} sve i8mm bf16 sve2", part="0xd0b"),
    )
}

DEBIAN = ("python3", "libgomp1", "libatomic1", "libstdc++6")
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17")


def qemu(cpu: Cpu) -> str | None:
    """Returns qemu's program for a CPU, None where it is not installed."""
    name = f"qemu-{cpu.architecture}"
    return shutil.which(f"{name}-static") or shutil.which(name)


def missing(cpu: Cpu) -> str | None:
    """Returns what a machine lacks to emulate a CPU, in a sentence, or None."""
    if platform.machine() != "x86_64":
        return "only an x86 machine emulates the others here"
    if qemu(cpu) is None:
        return f"there is no qemu-{cpu.architecture} here: apt-get install qemu-user-static"
    if cpu.part and shutil.which("apt-get") is None:
        return "an ARM Python is made of Debian's packages, and there is no apt-get here"
    return None


@dataclass(frozen=True, slots=True)
class Machine:
    """A folder with an ARM Python in it (`prepared`), and views of /proc for every CPU."""

    folder: Path

    def prepared(self, wheels: Sequence[Path] = ()) -> Machine:
        """Downloads Debian's Python and the packages that a bundle needs; some 300 MB."""
        self._debian()
        made = self.folder / "wheels"
        if not made.is_dir():
            self._wheels(made)
        for wheel in (*made.glob("*.whl"), *wheels):
            shutil.unpack_archive(wheel, self._packages, "zip")
        return self

    def run(
        self, cpu: Cpu, *arguments: str | Path, path: Sequence[Path] = (), cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python with these arguments on a CPU; the packages of `path` are found first."""
        program = qemu(cpu)
        assert program is not None
        python, packages = Path(sys.executable), [*path]
        if cpu.part:
            python = next((self.folder / "root" / "usr" / "bin").glob("python3.[0-9]*"))
            packages.append(self._packages)
        given = {
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        return subprocess.run(
            [program, "-L", self._view(cpu), "-cpu", cpu.model, python, *arguments],
            env=kept | given,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def _packages(self) -> Path:
        return self.folder / "packages"

    def _debian(self) -> None:
        """Unpacks Python and the libraries that wheels expect, as apt finds them for ARM."""
        place = self.folder / "apt"
        if (self.folder / "root").is_dir():
            return
        for name in ("lists/partial", "cache/archives/partial"):
            (place / name).mkdir(parents=True)
        (place / "status").touch()
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "root",
            "Dir::State": place,
            "Dir::State::Lists": place / "lists",
            "Dir::State::status": place / "status",
            "Dir::Cache": place / "cache",
        }
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
        _called(*apt, "update")
        _called(*apt, "install", "--yes", "--download-only", "--no-install-recommends", *DEBIAN)
        for package in (place / "cache" / "archives").glob("*.deb"):
            _called("dpkg", "-x", package, self.folder / "root.partial")
        (self.folder / "root.partial").rename(self.folder / "root")

    def _wheels(self, place: Path) -> None:
        """Downloads what requirements-run.txt needs, for that Python, in the pinned versions."""
        python = next((self.folder / "root" / "usr" / "bin").glob("python3.[0-9]*")).name
        _called(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
            *("--implementation", "cp", "--python-version", python.removeprefix("python")),
            *(word for name in PLATFORMS for word in ("--platform", f"{name}_aarch64")),
            *("--platform", "manylinux2014_aarch64", "--platform", "any"),
            *("-c", ROOT / "constraints.txt", "-r", ROOT / "requirements-run.txt"),
            *("-d", place),
        )

    def _view(self, cpu: Cpu) -> Path:
        """A folder that a program sees before the machine's own: the CPU that Linux tells of.

        ONNX Runtime reads there what an ARM CPU has, and ends where it finds an x86 one.
        """
        view = self.folder / f"view-{cpu.model}"
        system = view / "sys" / "devices" / "system" / "cpu"
        if not view.is_dir():
            (view / "proc").mkdir(parents=True)
            system.mkdir(parents=True)
            for name in ("possible", "present", "online"):
                (system / name).write_text("0\n")
            facts = {"processor": "0", "model name": cpu.model, "flags": cpu.instructions}
            if cpu.part:
                facts = {
                    "processor": "0",
                    "Features": cpu.instructions,
                    "CPU implementer": "0x41",
                    "CPU architecture": "8",
                    "CPU variant": "0x4",
                    "CPU part": cpu.part,
                    "CPU revision": "1",
                }
                for name in ("etc", "lib", "usr"):
                    (view / name).symlink_to(self.folder / "root" / name)
            lines = "".join(f"{key}\t: {value}\n" for key, value in facts.items())
            (view / "proc" / "cpuinfo").write_text(lines + "\n")
        return view


def _called(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
