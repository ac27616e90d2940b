"""moexport on a machine that only runs bundles, with only what requirements-run.txt installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from moexport.common.libraries import PACKAGES
from moexport.tests.command import Outcome, run
from moexport.tests.exporter.tensorrt.engines import needs_rtx
from moexport.tests.recorded import DATA, VIT_SETS, read_case
from moexport.tests.test_dependencies import PROJECT, named
from moexport.tests.test_wheel import PIP, ROOT, sdist, wheel

__all__ = ["sdist", "wheel"]  # fixtures

REQUIREMENTS = ROOT / "requirements-run.txt"
RESULTS = ROOT / "perf" / "results" / "demo.json"
MOST_MB, MOST_S = 250, 0.5
ROUNDS = 12
"""How often a time is measured at most before it counts as too long."""
HELP_S = 0.085
"""The time of `moexport --help` on an otherwise idle AMD EPYC (perf/results)."""

VIT = DATA / "soft_moe_vit" / "weights.pt"

Moexport = Callable[..., Outcome]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="its environments are laid out else"),
]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment that is created as docs/install.md describes."""
    place = tmp_path_factory.mktemp("small") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    pip = [*PIP, "--python", str(place / "bin" / "python"), "install"]
    wanted = ("-c", str(ROOT / "constraints.txt"), "-r", str(REQUIREMENTS))
    if subprocess.run([*pip, "--dry-run", "msgspec"], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    subprocess.run([*pip, *wanted], check=True, capture_output=True)
    subprocess.run([*pip, "--no-deps", wheel], check=True, capture_output=True)
    return place


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle from which engines can be built."""
    place = tmp_path_factory.mktemp("bundle")
    np.savez(place / "x.npz", input=read_case("soft_moe_vit").x)
    made = run(
        *("export", VIT, *VIT_SETS, "-o", place / "out", "--k", "2", "--target", "tensorrt-rtx"),
        *("--lowering", "gather", "--data", place / "x.npz", "--no-engine", "--expose-routing"),
    )
    assert made.code == 0, made.err
    return place / "out"


@pytest.fixture
def moexport(environment: Path, tmp_path: Path) -> Moexport:
    """The program of that environment, run in a separate folder."""

    def command(*arguments: str | Path, path: Path | None = None) -> Outcome:
        done = subprocess.run(
            [environment / "bin" / "moexport", *arguments],
            cwd=tmp_path,
            env=os.environ | ({} if path is None else {"PYTHONPATH": str(path)}),
            capture_output=True,
            text=True,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return command


def test_requirements_of_a_run_are_requirements_everywhere() -> None:
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    required = {line for line in lines if line}
    everywhere = {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cpu"]}
    assert required <= everywhere
    known = metadata.packages_distributions()
    left_out = {name for module in PACKAGES for name in named(known[module])}
    assert named([*everywhere]) - named([*required]) == left_out | {"ml-dtypes"}  # onnx requires it


def test_the_environment_is_small_and_without_pytorch(environment: Path) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    megabytes = sum(each.stat().st_size for each in site.rglob("*") if each.is_file()) / 1e6
    assert megabytes < MOST_MB, f"{megabytes:.0f} MB"
    there = {each.name for each in site.iterdir()}
    assert "onnxruntime" in there and not there & PACKAGES.keys()


def processor_seconds(command: Callable[[], Outcome]) -> float:
    """Returns the processor time of a command."""
    before = os.times()
    done = command()
    after = os.times()
    assert done.code == 0, done.err
    return sum(after[2:4]) - sum(before[2:4])


def test_run_gives_the_outputs_and_is_quick(
    moexport: Moexport, bundle: Path, tmp_path: Path
) -> None:
    files = ("-i", bundle.parent / "x.npz", "-o", "y.npz", "--force")
    seconds, help_seconds = [], []
    # Other work on the machine slows it down for a while, so the least time counts.
    for _ in range(ROUNDS):
        seconds.append(processor_seconds(lambda: moexport("run", bundle, *files)))
        help_seconds.append(processor_seconds(lambda: moexport("--help")))
        slower = max(1.0, min(help_seconds) / HELP_S)
        if min(seconds) / slower < MOST_S:
            break
    wanted = read_case("soft_moe_vit").y(2)
    assert np.abs(np.load(tmp_path / "y.npz")["output"] - wanted).max() <= 1e-4 * abs(wanted).max()
    assert min(seconds) / slower < MOST_S, (
        f"{min(seconds):.2f} s on a machine that is {slower:.1f} times as slow as when it is quiet"
    )


def test_every_command_on_bundles_works(moexport: Moexport, bundle: Path) -> None:
    checks = moexport("verify", bundle, "--json")
    assert checks.code == 0, checks.err
    named_checks = {each["name"] for each in json.loads(checks.out)["checks"]}
    assert {"ONNX check of model.onnx", "parity of model.onnx"} <= named_checks
    told = moexport("inspect", bundle)
    assert told.code == 0 and "blocks.2.mlp/selected int64 (batch, 2)" in told.out
    report = moexport("report", RESULTS, "-o", "report.html")
    assert report.code == 0, report.err
    assert "no figures were written: vl-convert is not installed" in report.err
    doctor = moexport("doctor", "--json")
    by_name = {each["name"]: each for each in json.loads(doctor.out)["abilities"]}
    assert by_name["run on CPU"]["available"]
    assert by_name["export to ONNX"]["detail"].startswith("export needs PyTorch")
    assert moexport("--help").code == moexport("export", "--help").code == 0


IN_PYTHON = """
import sys
import numpy as np
import moexport
x = np.load(sys.argv[2])["input"]
alone = moexport.Session(sys.argv[1] + "/model.onnx")
bundle = moexport.Bundle.open(sys.argv[1])
assert np.array_equal(alone(x), bundle.session()(x))
assert "blocks.2.mlp/selected" in alone.run(x)
assert not {"torch", "onnx_ir", "vl_convert"} & sys.modules.keys()
"""


def test_a_session_runs_in_python(environment: Path, bundle: Path) -> None:
    python = environment / "bin" / "python"
    subprocess.run([python, "-c", IN_PYTHON, bundle, bundle.parent / "x.npz"], check=True)


@pytest.mark.parametrize(
    "command",
    [
        ("export", VIT, "-o", "out"),
        ("calibrate", VIT, "--data", VIT.parent / "io.npz", "-o", "t.json"),
        ("inspect", VIT),
        ("bench", VIT, "-o", "report"),
        ("specialise", VIT, "--data", VIT.parent / "io.npz"),
        ("demo",),
    ],
    ids=lambda command: " ".join(map(str, command[:1])),
)
def test_commands_that_need_pytorch_say_how_to_install_it(
    command: tuple[str | Path, ...], moexport: Moexport, tmp_path: Path
) -> None:
    done = moexport(*command)
    assert done.code == 1
    assert "needs PyTorch, which is not installed" in done.error
    assert "pip install '.[cpu]'" in done.hint
    assert [*tmp_path.iterdir()] == []


def linked(distributions: Iterator[str], place: Path) -> Path:
    """Creates a folder with links to installed packages, so that another environment finds them."""
    place.mkdir()
    for name in distributions:
        installed = metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}:
            (place / top).symlink_to(str(installed.locate_file(top)))
    return place


@needs_rtx
def test_build_compiles_an_engine(moexport: Moexport, bundle: Path, tmp_path: Path) -> None:
    refused = moexport("build", bundle)
    assert refused.code == 1
    assert refused.error == "TensorRT-RTX is not installed"
    rtx = (each.metadata["Name"] for each in metadata.distributions())
    names = (n for n in rtx if n == "polygraphy" or n.startswith("tensorrt_rtx"))
    done = moexport("build", bundle, "--json", path=linked(names, tmp_path / "rtx"))
    assert done.code == 0, done.err
    (record,) = json.loads(done.out)
    assert (bundle / record["file"]).is_file()
    run_it = ("run", bundle, "-i", bundle.parent / "x.npz", "-o", "y.npz")
    without = moexport(*run_it, "--engine", "tensorrt-rtx", path=tmp_path / "rtx")
    assert without.code in (0, 1)
    assert "Traceback" not in without.err and "defect" not in without.err
