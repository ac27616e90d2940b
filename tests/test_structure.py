"""The structure in docs/architecture.md: imports go one way, and no folder has too many modules."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
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
    {"bench"},
    {"exporter"},
    {"calibration"},
    {"data"},
    {"graphs"},
    {"common"},
    {"errors"},
)
"""The top-level folders from the top down: each may import from those below it."""

MOST = 16
"""The largest number of modules in a folder."""


def module_files() -> list[Path]:
    """Returns the modules of the package, relative to its root."""
    files = [*ROOT.glob("*.py")]
    for folder in FOLDERS:
        files += (ROOT / folder).rglob("*.py")
    modules = (file.relative_to(ROOT) for file in files)
    return sorted(file for file in modules if "tests" not in file.parts)


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {module_name(file) for file in module_files()}


def imported(file: Path) -> Iterator[str]:
    """Yields the modules of the package that a file imports, even inside functions."""
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
def test_a_folder_has_few_modules(folder: Path) -> None:
    beside = {file.name for file in (ROOT / folder).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert len(beside) <= MOST


def test_the_page_on_the_architecture_names_files_that_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+(?:\.py|/))`", text)
    assert len(named) > 40
    assert not [each for each in named if not (ROOT / each).exists()]


def defined(file: Path) -> Iterator[str]:
    """Yields the classes and type aliases of a module."""
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
    """As on Windows and macOS: no two names differ only by case, and Windows reserves none."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is not a clone")
    files = [Path(name) for name in listed.stdout.split("\0") if name]
    places = {place for file in files for place in (file, *file.parents)}
    assert len({str(place).lower() for place in places}) == len(places)
    reserved = re.compile(
        r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?|.*[<>:\"|?*\\].*|.*[. ]", re.IGNORECASE
    )
    assert [str(f) for f in files if any(reserved.fullmatch(part) for part in f.parts)] == []


WHOSE = {"runtime", "provider", "backend"}
"""The fields of a target's record that are also names."""


def asks_for_a_name(source: str) -> list[str]:
    """Returns the expressions that compare a target's name, or contain one."""
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


def test_lowerings_check_a_target_s_abilities_and_not_its_name() -> None:
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
def test_a_lowering_that_checks_a_name_is_found(asked: str) -> None:
    assert asks_for_a_name(f"x = {asked}")


def test_a_lowering_may_check_a_target_s_abilities() -> None:
    assert not asks_for_a_name("x = not TARGETS[target].data_sizes and precision in record.moe")


WAY_OF_K = ("exporter/options", "exporter/job", "exporter/plan", "exporter/trace", "exporter/write",
            "exporter/export", "graphs/lower", "graphs/layers", "graphs/routing")  # fmt: skip
"""The modules that handle the k of an export; in `graphs/fusion`, k is an attention's keys."""


FILES_OF_K = ("cli.py", "commands/export.py", "exporter/options.py", "exporter/export.py",
              "exporter/job.py", "exporter/plan.py", "exporter/trace.py", "graphs/lower.py",
              "graphs/k.py", "graphs/lowerings/base.py", "graphs/lowerings/gather.py",
              "graphs/routing.py", "exporter/write.py")  # fmt: skip
"""The files of `export --k 4`, from the command line to TopK and the written graph."""

LINES_OF_K = 3_587
"""The lines of these files, without parity: a budget that only falls."""


BY_TEXT = {"cli": {"commands.export"}, "graphs.lowerings": {"graphs.lowerings.gather"}}
"""What the lists of commands and of lowerings name, so that it is imported on use."""


def test_the_files_from_the_option_k_to_its_node_only_become_shorter() -> None:
    lines = [len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in FILES_OF_K]
    assert sum(lines) <= LINES_OF_K
    edges = graph() | BY_TEXT
    seen, left = set[str](), ["cli"]
    while left:
        name = left.pop()
        seen.add(name)
        left += edges[name] - seen
    assert {module_name(Path(file)) for file in FILES_OF_K} <= seen


LINES = {"core": 51_295, "plugins": 30_005}
"""The lines of the product's modules: a budget that only falls."""


def test_the_product_only_becomes_shorter() -> None:
    found = Counter[str]()
    for file in module_files():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        found["plugins" if file.parts[0] == "plugins" else "core"] += len(lines)
    assert all(found[room] <= most for room, most in LINES.items()), found


def records_with_k(source: str) -> set[str]:
    """Returns the classes of a module that have a field k."""
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return {
        each.name
        for each in classes
        if any(ast.unparse(one).startswith("k: ") for one in each.body)
    }


def test_k_lives_in_three_records_between_the_options_and_the_graph() -> None:
    files = [file for file in module_files() if file.as_posix().startswith(WAY_OF_K)]
    found = [records_with_k((ROOT / file).read_text(encoding="utf-8")) for file in files]
    assert len(files) > 20
    assert set().union(*found) == {"ExportOptions", "LayerPlan", "Layer"}


def test_a_record_with_a_field_k_is_found() -> None:
    source = "class One:\n    k: int = 3\nclass Other:\n    def k(self) -> int:\n        k: int = 3"
    assert records_with_k(source) == {"One"}


def test_one_method_makes_a_builder_s_layer_of_a_planned_one() -> None:
    found = [
        file.as_posix()
        for file in module_files()
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Layer", "SoftMoELayer")
    ]
    assert found == ["graphs/lowerings/base.py"]


def opens_a_graph(source: str) -> bool:
    """Whether a module opens a session of ONNX Runtime."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func).endswith("InferenceSession") for call in calls)


def test_one_module_opens_graphs_in_onnx_runtime() -> None:
    files = [f for f in module_files() if opens_a_graph((ROOT / f).read_text(encoding="utf-8"))]
    assert [file.as_posix() for file in files] == ["exporter/session.py"]


def test_product_code_uses_no_mocks() -> None:
    found = []
    for file in module_files():
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found += [str(file) for name in names if name.partition(".")[0] == "unittest"]
    assert found == []
