"""Bundles on other CPUs, by emulation: they verify and run, and what is wrong there is told."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import MANIFEST_FILE
from moexport.tests.command import run
from moexport.tests.hard.cpus.__main__ import off
from moexport.tests.hard.cpus.emulated import CPUS, Machine, missing
from moexport.tests.recorded import DATA, VIT_SETS, read_case
from moexport.tests.test_wheel import sdist, wheel

__all__ = ["sdist", "wheel"]  # fixtures

pytestmark = pytest.mark.slow

PRECISIONS = ("fp32", "fp16", "int8")
COMMANDS = """
import json, sys
from moexport.__main__ import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["moexport", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""
"""Commands in one process, up to the first that fails: an import takes an emulator long."""

VIT = (DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS)


@pytest.fixture(scope="module")
def machine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """An ARM Python with what requirements-run.txt installs, and moexport."""
    lacking = missing(CPUS["cortex-a76"])
    if lacking is not None:
        pytest.skip(lacking)
    place = tmp_path_factory.mktemp("machine")
    shutil.unpack_archive(wheel, place / "own", "zip")  # for the Python of this machine
    try:
        return Machine(place).prepared([wheel])
    except RuntimeError as error:
        pytest.skip(f"the packages for ARM cannot be had: {error}")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in each precision, the inputs, and what each gives here."""
    place = tmp_path_factory.mktemp("bundles")
    np.savez(place / "x.npz", input=read_case("soft_moe_vit").x)
    for precision in PRECISIONS:
        options = ("--k", "2", "--target", "ort-cpu", "--data", place / "x.npz")
        out = place / precision
        done = run("export", *VIT, "-o", out, "--precision", precision, *options)
        assert done.code == 0, done.err
        done = run("run", out, "-i", place / "x.npz", "-o", place / f"{precision}.npz")
        assert done.code == 0, done.err
    return place


def commands(
    machine: Machine, cpu: str, *commands: tuple[str | Path, ...]
) -> subprocess.CompletedProcess[str]:
    """Runs commands on a CPU; on an x86 one, too, without PyTorch, from the wheel."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    return machine.run(CPUS[cpu], "-c", COMMANDS, words, path=[machine.folder / "own"])


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell", "cortex-a53", "cortex-a76"])
def test_bundles_verify_and_run_on_other_cpus(
    cpu: str, machine: Machine, bundles: Path, tmp_path: Path
) -> None:
    words: list[tuple[str | Path, ...]] = []
    for precision in PRECISIONS:
        out = bundles / precision
        y = tmp_path / f"{precision}.npz"
        words += [("verify", out), ("run", out, "-i", bundles / "x.npz", "-o", y)]
    done = commands(machine, cpu, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    for precision in PRECISIONS:
        y = tmp_path / f"{precision}.npz"
        with np.load(y) as there, np.load(bundles / f"{precision}.npz") as here:
            assert off(there["output"], here["output"]) < (1e-3 if precision == "int8" else 1e-5)


def test_an_fp16_graph_that_a_cpu_sums_in_fp16_fails_there(
    machine: Machine, tmp_path: Path
) -> None:
    """As an earlier version wrote it for CPUs: FP16 products, as a GPU's graph has them."""
    out = tmp_path / "out"
    done = run(
        *("export", "moexport.tests.hard.cpus.networks:cancelling", "--k", "4", "-o", out),
        *("--precision", "fp16", "--target", "ort-cuda"),
    )
    assert done.code == 0, done.err
    given = Bundle.open(out).manifest
    before = shutil.copytree(out, tmp_path / "before")
    old = replace(given, target="ort-cpu").to_json()
    (before / MANIFEST_FILE).write_text(old, encoding="utf-8")
    assert run("verify", before).code == 0  # x86 computes it in FP32
    # The same graph for a GPU is checked with a GPU's rounding, and passes.
    there = commands(machine, "cortex-a76", ("verify", out), ("verify", before))
    assert there.returncode != 0
    for words in ("CPUExecutionProvider on aarch64 with asimdhp", "in FP16", "Export it again"):
        assert there.stdout.count(words) == 1


def test_fp16_is_as_near_as_on_x86(machine: Machine, tmp_path: Path) -> None:
    words: list[tuple[str | Path, ...]] = []
    names = ("long", "cancelling", "large")
    for name in names:
        out = tmp_path / name
        source = f"moexport.tests.hard.cpus.networks:{name}"
        done = run("export", source, "--k", "4", "-o", out, "--precision", "fp16")
        assert done.code == 0, done.err
        with np.load(out / "parity.npz") as reference:
            np.savez(tmp_path / f"{name}.npz", input=reference["x"])
        run_it = ("run", out, "-i", tmp_path / f"{name}.npz", "-o")
        assert run(*run_it, tmp_path / f"{name}-here.npz").code == 0
        words.append((*run_it, tmp_path / f"{name}-there.npz"))
    ran = commands(machine, "cortex-a76", *words)
    assert ran.returncode == 0, ran.stderr
    for name in names:
        with (
            np.load(tmp_path / f"{name}-here.npz") as here,
            np.load(tmp_path / f"{name}-there.npz") as there,
            np.load(tmp_path / name / "parity.npz") as reference,
        ):
            error = off(here["output"], reference["y"])
            assert off(there["output"], reference["y"]) <= 1.5 * max(error, 1e-5)
