"""The uploaded files: an sdist of the whole project, and the wheel that is built from it."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moexport.cli import COMMANDS
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.recorded import DATA, ENTMAX, read_case

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("bench", "calibration", "commands", "common", "data", "exporter", "graphs", "plugins"),
)
"""Everything in the package below its root, except the pages that messages name."""


def package_files(pattern: str = "*") -> list[Path]:
    """Returns the files of the package in those folders, without the tests of plugins."""
    files = [file for name in FOLDERS for file in (ROOT / name).rglob(pattern)]
    return [f for f in files if f.is_file() and "tests" not in f.relative_to(ROOT).parts]


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
ELSEWHERE = {"build", "demo", "demo-mumoe", "dist", "site"}
"""Files that programs write into the source folders."""


def copied_sources(folder: Path) -> Path:
    """Copies the sources, without files that programs write into them."""

    def left_out(place: str, names: list[str]) -> set[str]:
        hidden = {n for n in names if (n[0] == "." and n != ".ci") or n.endswith(".egg-info")}
        return hidden | {"__pycache__"} | (ELSEWHERE if Path(place) == ROOT else set())

    return Path(shutil.copytree(ROOT, folder / "source with spaces", ignore=left_out))


def build(kind: str, source: Path, folder: Path) -> None:
    """Builds an sdist, a wheel or an editable wheel into a folder, as pip and uv do."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, folder], cwd=source, check=True, capture_output=True
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", copied_sources(folder), folder)
    (archive,) = folder.glob("moexport-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel, built only from the sdist."""
    subprocess.run(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", sdist.parent, sdist],
        check=True,
        capture_output=True,
    )
    (built,) = sdist.parent.glob("moexport-*.whl")
    return built


@pytest.mark.parametrize("kind", ["sdist", "wheel", "editable"])
def test_a_build_leaves_nothing_among_the_sources(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = copied_sources(tmp_path)
    before = sorted(source.rglob("*"))
    (tmp_path / "built").mkdir()
    build(kind, source, tmp_path / "built")
    assert [*(tmp_path / "built").iterdir()]
    assert sorted(source.rglob("*")) == before


def test_the_sdist_contains_the_files_of_a_clone(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("these sources are not a clone")
    wanted = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert wanted - names == {".gitignore"}


def test_the_wheel_contains_every_module_and_the_files_they_read(wheel: Path) -> None:
    sources = [
        *(file for file in ROOT.glob("*.py") if file.name != "setup.py"),
        *package_files(),
        ROOT / "py.typed",
        *(ROOT / "docs").rglob("*.md"),
    ]
    wanted = {
        f"moexport/{file.relative_to(ROOT).as_posix()}"
        for file in sources
        if "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "moexport = moexport.__main__:main" in archive.read(entry).decode()
    assert {name for name in names if name.startswith("moexport/")} == wanted
    for asset in ("report/assets/report.html", "report/assets/report.js", "results.schema.json"):
        assert f"moexport/bench/{asset}" in names
    assert "moexport/py.typed" in names


def test_a_package_index_accepts_both_and_its_page_has_no_relative_links(
    sdist: Path, wheel: Path
) -> None:
    pytest.importorskip("twine")
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", sdist, wheel],
        check=True,
        capture_output=True,
    )
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload())
    assert page.startswith("# moexport")
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", page) == []
    assert "docs/guide.md" in page


def test_the_wheel_works_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([*PIP, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n" + (
        "import moexport.cli; print(moexport.cli.__file__, flush=True)\n"
        "from moexport.__main__ import main; main()"
    )
    model = DATA / "soft_moe_mnist" / "weights.pt"
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    for command in (["export", str(model), "-o", "out", "--k", "4"], ["verify", "out"]):
        done = run([sys.executable, "-c", program, *command], cwd=tmp_path)
        assert done.stdout.splitlines()[0] == str(tmp_path / "site" / "moexport" / "cli.py")
    assert "parity of model.onnx" in done.stdout
    refused = functools.partial(run, check=False)(
        [sys.executable, "-c", program, "inspect", __file__], cwd=tmp_path
    )
    named = re.search(r"^hint: .*?(/\S+/docs/families\.md)", refused.stderr, re.MULTILINE)
    assert named is not None, refused.stderr
    assert Path(named[1]) == tmp_path / "site" / "moexport" / "docs" / "families.md"
    assert Path(named[1]).read_text(encoding="utf-8").startswith("# Families")


BARE = """
import sys
for name in {extras}:
    sys.modules[name] = None
sys.path.insert(0, {site!r})
# An editable installation would find what is missing here.
sys.meta_path = [each for each in sys.meta_path if "__editable__" not in each.__module__]
from moexport.__main__ import main
main()
"""
EXTRAS = {
    *("jinja2", "mlperf_loadgen", "onnxruntime_genai", "openvino", "optuna", "polygraphy"),
    *("pyarrow", "ray", "sklearn", "tensorrt", "tensorrt_rtx", "tensorstore", "tokenizers"),
    *("transformers", "tritonclient", "uvicorn"),
}


@pytest.fixture(scope="module")
def bare(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed wheel without plugins and without packages of extras."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([*PIP, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    shutil.rmtree(folder / "site" / "moexport" / "plugins")
    program = BARE.format(extras=EXTRAS, site=str(folder / "site"))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )

    return run


@pytest.mark.parametrize(("name", "settings"), [("soft_moe_mnist", ()), ("mumoe_cp", ENTMAX)])
def test_the_core_alone_works_for_soft_moe_and_mumoe(
    name: str,
    settings: tuple[str, ...],
    bare: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    def printed(*words: str) -> str:
        done = bare(*words)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    case = read_case(name)
    out, x, y = (str(tmp_path / file) for file in ("out", "x.npz", "y.npz"))
    model, k = (str(case.weights), *settings), case.ks[0]
    assert case.family in printed("inspect", *model)
    printed("export", *model, "-o", out, "--k", str(k))
    assert "model.onnx" in printed("inspect", out)
    assert "parity of model.onnx" in printed("verify", out)
    arrays: dict[str, Any] = {Bundle.open(out).manifest.inputs[0].name: case.x}
    np.savez(x, **arrays)
    printed("run", out, "-i", x, "-o", y)
    with np.load(y) as written:
        (output,) = written.files
        np.testing.assert_allclose(written[output], case.y(k), rtol=1e-4, atol=1e-5)


def test_the_core_alone_lists_its_commands_and_what_does_not_load(
    bare: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    listed, helped, doctor = bare("--help"), bare("bench", "--help"), bare("doctor")
    for done in (listed, helped, doctor):
        assert (done.returncode, done.stderr) == (0, "")
    commands = listed.stdout.partition("Commands:")[2]
    for name in COMMANDS.names:
        assert f"\n  {name} " in commands
    assert "Example: moexport bench" in helped.stdout
    for group, names in points.items():
        for name in names:
            said = f"{group}: {name} cannot be loaded: ModuleNotFoundError"
            assert said in doctor.stdout
    refused = bare("tune", "model.pt")
    assert refused.returncode == 1
    assert "tune: the plugin of moexport" in refused.stderr
    assert "cannot be loaded: ModuleNotFoundError" in refused.stderr


def test_the_wheel_s_requirements_can_be_installed_together(wheel: Path) -> None:
    dry = [*PIP, "install", "--dry-run", "--ignore-installed"]
    if subprocess.run([*dry, "--no-deps", "msgspec"], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached")
    # Resolved afresh, as in an empty environment, by the packages' metadata; nothing is installed.
    done = subprocess.run(
        [*dry, f"{wheel}[cpu]"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
