"""Bundles on other CPUs, by emulation: they verify and run, and what is wrong there is told."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import MANIFEST_FILE
from moexport.tests.command import run
from moexport.tests.cpus.__main__ import off
from moexport.tests.cpus.emulated import CPUS, Machine, missing
from moexport.tests.recorded import DATA, VIT_SETS, read_case
from moexport.tests.test_wheel import sdist, wheel

__all__ = ["sdist", "wheel"]  # fixtures

pytestmark = pytest.mark.slow

PRECISIONS = ("fp32", "fp16", "int8")
VIT = (DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS)


@pytest.fixture(scope="module")
def machine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """An ARM Python with what requirements-run.txt installs, and moexport."""
    lacking = missing(CPUS["cortex-a76"])
    if lacking is not None:
        pytest.skip(lacking)
    try:
        return Machine(tmp_path_factory.mktemp("machine")).prepared([wheel])
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


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell", "cortex-a53", "cortex-a76"])
def test_bundles_verify_and_run_on_other_cpus(
    cpu: str, machine: Machine, bundles: Path, wheel: Path, tmp_path: Path
) -> None:
    path = [machine.folder / "own"]  # the wheel, for the Python of this machine
    if not path[0].is_dir():
        shutil.unpack_archive(wheel, path[0], "zip")
    for precision in PRECISIONS:
        out = bundles / precision
        done = machine.run(CPUS[cpu], "-m", "moexport", "verify", out, path=path)
        assert done.returncode == 0, done.stdout + done.stderr
        y = tmp_path / f"{precision}.npz"
        words = ("run", out, "-i", bundles / "x.npz", "-o", y)
        done = machine.run(CPUS[cpu], "-m", "moexport", *words, path=path)
        assert done.returncode == 0, done.stderr
        with np.load(y) as there, np.load(bundles / f"{precision}.npz") as here:
            assert off(there["output"], here["output"]) < (1e-3 if precision == "int8" else 1e-5)


def test_an_fp16_graph_that_a_cpu_sums_in_fp16_fails_there(
    machine: Machine, tmp_path: Path
) -> None:
    """As an earlier version wrote it for CPUs: FP16 products, as a GPU's graph has them."""
    out = tmp_path / "out"
    done = run(
        *("export", "moexport.tests.cpus.networks:cancelling", "--k", "4", "-o", out),
        *("--precision", "fp16", "--target", "ort-cuda"),
    )
    assert done.code == 0, done.err
    given = Bundle.open(out).manifest
    before = replace(given, target="ort-cpu")
    (out / MANIFEST_FILE).write_text(before.to_json(), encoding="utf-8")
    assert run("verify", out).code == 0  # x86 computes it in FP32
    old = machine.run(CPUS["cortex-a53"], "-m", "moexport", "verify", out)
    assert old.returncode == 0, old.stdout
    new = machine.run(CPUS["cortex-a76"], "-m", "moexport", "verify", out)
    assert new.returncode != 0
    for words in ("CPUExecutionProvider on aarch64 with asimdhp", "in FP16", "Export it again"):
        assert words in new.stdout
    # The same graph for a GPU is checked, and run, with a GPU's rounding.
    (out / MANIFEST_FILE).write_text(given.to_json(), encoding="utf-8")
    assert machine.run(CPUS["cortex-a76"], "-m", "moexport", "verify", out).returncode == 0


@pytest.mark.parametrize("network", ["long", "cancelling", "large"])
def test_fp16_is_as_near_as_on_x86(network: str, machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = f"moexport.tests.cpus.networks:{network}"
    done = run("export", source, "--k", "4", "-o", out, "--precision", "fp16")
    assert done.code == 0, done.err
    with np.load(out / "parity.npz") as reference:
        x, wanted = reference["x"], reference["y"]
    np.savez(tmp_path / "x.npz", input=x)
    words = ("run", out, "-i", tmp_path / "x.npz", "--force", "-o")
    assert run(*words, tmp_path / "here.npz").code == 0
    there = machine.run(CPUS["cortex-a76"], "-m", "moexport", *words, tmp_path / "there.npz")
    assert there.returncode == 0, there.stderr
    with np.load(tmp_path / "here.npz") as here, np.load(tmp_path / "there.npz") as far:
        error = off(here["output"], wanted)
        assert off(far["output"], wanted) <= 1.5 * max(error, 1e-5)
