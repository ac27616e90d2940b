"""The structure that docs/architecture.md draws: imports run one way, and no folder is a crowd."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from moexport.graphs.targets import TARGETS

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("bench", "calibration", "commands", "common", "data", "exporter", "graphs", "plugins"),
)
PAGE = ROOT / "docs" / "architecture.md"

ORDER = (
    {"__init__"},
    {"plugins"},
    {"__main__"},
    {"cli"},
    {"commands"},
    {"calls"},
    {"api"},
    {"bench"},
    {"exporter"},
    {"calibration"},
    {"data"},
    {"graphs"},
    {"common"},
    {"errors"},
)
"""The rooms from the top down: each may import from those below it. The façade names all."""

MOST = 16
"""Modules side by side in one folder."""


def module_files() -> list[Path]:
    """The modules of the package, relative to its root."""
    files = [*ROOT.glob("*.py")]
    for folder in FOLDERS:
        files += (ROOT / folder).rglob("*.py")
    return sorted(file.relative_to(ROOT) for file in files)


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {module_name(file) for file in module_files()}


def imported(file: Path) -> Iterator[str]:
    """The modules of the package that a file imports anywhere, inside functions too."""
    package = file.parent.parts
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = (*package[: len(package) - (node.level - 1)], *(node.module or "").split("."))
        place = ".".join(part for part in base if part)
        for alias in node.names:
            inner = f"{place}.{alias.name}".strip(".")
            if inner in NAMES or place in NAMES:
                yield inner if inner in NAMES else place


def graph() -> dict[str, set[str]]:
    return {module_name(file): set(imported(file)) - {module_name(file)} for file in module_files()}


def test_no_module_imports_itself_through_others() -> None:
    edges, done, path = graph(), set[str](), list[str]()

    def visit(name: str) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(edges[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in sorted(edges):
        visit(name)


def test_imports_run_one_way() -> None:
    floor = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if floor[other.partition(".")[0]] < floor[name.partition(".")[0]]
    ]
    assert not wrong


@pytest.mark.parametrize(
    "folder", sorted({file.parent for file in module_files()} | {Path("perf")}), ids=str
)
def test_a_folder_is_no_crowd(folder: Path) -> None:
    beside = {file.name for file in (ROOT / folder).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert len(beside) <= MOST


def test_the_page_on_the_architecture_names_files_that_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+(?:\.py|/))`", text)
    assert len(named) > 40
    assert not [each for each in named if not (ROOT / each).exists()]


def test_every_folder_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    folders = {file.parent for file in module_files()} - {Path()}
    assert not [folder for folder in folders if f"`{folder}/`" not in text]


def defined(file: Path) -> Iterator[str]:
    """The classes and type aliases of a module."""
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            alias = isinstance(node.value, ast.Subscript | ast.Name | ast.BinOp)
            if alias and name.lstrip("_")[:1].isupper() and not name.isupper():
                yield name


def test_one_name_is_one_class_or_type() -> None:
    places: dict[str, list[str]] = {}
    for file in module_files():
        for name in defined(file):
            places.setdefault(name, []).append(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_clone_has_its_files_where_names_have_no_case_and_some_are_reserved() -> None:
    """As on Windows and macOS: no two differ by case alone, and none is one that Windows keeps."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no clone")
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    places = {place for file in files for place in (file, *file.parents)}
    assert len({str(place).lower() for place in places}) == len(places)
    reserved = re.compile(
        r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?|.*[<>:\"|?*\\].*|.*[. ]", re.IGNORECASE
    )
    assert [str(f) for f in files if any(reserved.fullmatch(part) for part in f.parts)] == []


WHOSE = {"runtime", "provider", "backend"}
"""What of a target's record is a name, too."""


def asks_for_a_name(source: str) -> list[str]:
    """The expressions that compare what a target is called, or name one."""
    names = TARGETS.names
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in names:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            whose = [part.attr for part in parts if part.attr in WHOSE]
            found += [ast.unparse(node)] if whose else []
    return found


def test_lowerings_ask_a_target_what_it_can_do_and_not_what_it_is_called() -> None:
    files = [file for file in module_files() if "lowerings" in file.parts]
    assert len(files) > 15
    asked = {file: asks_for_a_name((ROOT / file).read_text(encoding="utf-8")) for file in files}
    assert {str(file): found for file, found in asked.items() if found} == {}


@pytest.mark.parametrize(
    "asked",
    [
        'target == "ort-cpu"',
        'target in ("onnx", "openvino")',
        'TARGETS[target].runtime == "openvino"',
        "TARGETS[target].provider == CUDA_PROVIDER",
        "record.backend is not None",
        'machine_for("tensorrt")',
    ],
)
def test_a_lowering_that_asks_for_a_name_is_found(asked: str) -> None:
    assert asks_for_a_name(f"x = {asked}")


def test_a_lowering_may_ask_for_what_a_target_can_do() -> None:
    assert not asks_for_a_name("x = not TARGETS[target].data_sizes and precision in record.moe")
