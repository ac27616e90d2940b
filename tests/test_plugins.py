"""The core names no plugin: it lists plugins by entry points, and imports one on first use."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from graphlib import TopologicalSorter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
from moexport.cli import COMMANDS
from moexport.common.option import CALLS
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.runtimes import of_plugins
from moexport.exporter.session import SessionOptions
from moexport.tests.recorded import DATA
from moexport.tests.test_structure import ROOT, graph, module_files

BELOW: dict[str, set[str]] = {
    "cluster": {"tune"},
    "demo": {"service", "token_routed", "text", "tune"},
    "jax": set(),
    "openvino": set(),
    "own_layers": {"token_routed"},
    "service": set(),
    "studies": set(),
    "text": {"token_routed"},
    "token_routed": set(),
    "triton": set(),
    "tune": {"service"},
}
"""The plugins that each plugin imports."""


def test_the_core_imports_no_plugin() -> None:
    """Except the façade, which names the plugins' calls and imports them on first use."""
    found = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if other.startswith("plugins") and not name.startswith("plugins") and name != "__init__"
    ]
    assert found == []


def test_the_core_names_no_plugin() -> None:
    """Not even in a text from which a module could be imported."""
    named = [
        f"{file}: {line.strip()}"
        for file in module_files()
        if file.parts[0] != "plugins" and file != Path("__init__.py")
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
        if re.search(r"\bplugins[./]\w", line)
    ]
    assert named == []


OPEN_OR_TIME_GRAPHS = ("bench", "exporter/bundle", "exporter/session.py")


def runtimes_named(source: str) -> list[str]:
    """Returns the names and texts of a module, except docstrings, that name a plugin's runtime."""
    tree = ast.parse(source)
    said = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words = [
        node.id if isinstance(node, ast.Name) else str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and node not in said)
    ]
    theirs = declared()["moexport.runtimes"]
    return [word for word in words if any(name in word.lower() for name in theirs)]


def test_what_opens_or_times_a_graph_names_no_runtime_of_a_plugin() -> None:
    files = [each for each in module_files() if each.as_posix().startswith(OPEN_OR_TIME_GRAPHS)]
    found = {str(file): runtimes_named((ROOT / file).read_text(encoding="utf-8")) for file in files}
    assert len(files) > 40
    assert not {file: words for file, words in found.items() if words}


def test_a_module_that_names_a_plugin_s_runtime_is_found() -> None:
    source = '"""OpenVINO."""\nif OPENVINO:\n    title = f"{x} is OpenVINO\'s"\n'
    assert runtimes_named(source) == ["OPENVINO", " is OpenVINO's"]


def test_plugins_import_each_other_one_way() -> None:
    found: dict[str, set[str]] = {name: set() for name in BELOW}
    for name, others in graph().items():
        for other in others:
            here, there = name.split("."), other.split(".")
            if here[0] == there[0] == "plugins" and len(here) > 1 and here[1] != there[1]:
                found[here[1]].add(there[1])
    assert found == BELOW
    assert list(TopologicalSorter(BELOW).static_order())


LOADED = """
import json, sys
from pathlib import Path
import moexport

def ours():
    modules = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "moexport"}
    files = {m.__file__ for m in modules.values() if getattr(m, "__file__", None)}
    return [len(files), sum(len(Path(file).read_text().splitlines()) for file in files)]

import moexport.exporter.export
imported = ours()
model = moexport.load(sys.argv[1])
moexport.export(model, sys.argv[2], k=2)
rooms = ("moexport.plugins.", "moexport.exporter.tensorrt", "moexport.bench")
beside = sorted(name for name in sys.modules if name.startswith(rooms))
print(json.dumps([imported, ours(), beside]))
"""

IMPORTED = (65, 16_682)
"""Modules of moexport, and their lines, that `import moexport.exporter.export` loads: they fall."""

EXPORTED = (100, 24_629)
"""The same after a plain FP32 Soft MoE was loaded and exported."""


@pytest.mark.slow
def test_an_export_loads_no_plugin_no_tensorrt_and_no_more_of_the_core_than_before(
    tmp_path: Path,
) -> None:
    weights = DATA / "soft_moe_lucidrains" / "weights.pt"
    done = subprocess.run(
        [sys.executable, "-c", LOADED, weights, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported, exported, beside = json.loads(done.stdout)
    assert beside == []
    assert all(now <= most for now, most in zip(imported, IMPORTED, strict=True)), imported
    assert all(now <= most for now, most in zip(exported, EXPORTED, strict=True)), exported


def imported_at_once(source: str) -> list[str]:
    """Returns the modules that a module imports at its top level, as it spells them."""
    statements = ast.parse(source).body
    return [each.module or "" for each in statements if isinstance(each, ast.ImportFrom)]


def test_the_exporter_imports_tensorrt_only_for_an_engine() -> None:
    files = [file for file in module_files() if file.parts[0] == "exporter"]
    found = [
        f"{file} imports {module}"
        for file in files
        if "tensorrt" not in file.parts
        for module in imported_at_once((ROOT / file).read_text(encoding="utf-8"))
        if "tensorrt" in module.split(".")
    ]
    assert len(files) > 60
    assert found == []


def test_an_import_of_tensorrt_outside_functions_is_found() -> None:
    source = "from .tensorrt.engines import add\ndef later():\n    from .tensorrt import cuda"
    assert imported_at_once(source) == ["tensorrt.engines"]


def declared() -> dict[str, dict[str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points: dict[str, dict[str, str]] = project["entry-points"]
    return points


def test_the_installed_entry_points_are_those_that_the_project_declares() -> None:
    for group, points in declared().items():
        found = {
            point.name: point.value
            for point in entry_points(group=group)
            if point.dist is not None and point.dist.name == "moexport"
        }
        assert found == points, "install it again: pip install -e ."


PROGRAM = """
import json, sys
import moexport
before = [name for name in sys.modules if name.startswith("moexport.plugins")]
scanned = "importlib.metadata" in sys.modules
from moexport.common.registry import unloadable
from moexport.exporter.checkpoints.readers import READERS
try:
    names = READERS.names
    listed = [name for name in sys.modules if name.startswith(("moexport.plugins", "theirs"))]
    found = [reader.name for reader in READERS]
    error = None
except moexport.PluginError as raised:
    names = listed = found = None
    error = [raised.message, raised.hint]
print(json.dumps({
    "before": before, "scanned": scanned, "names": names, "listed": listed, "found": found,
    "error": error,
    "unloadable": [[each.name, each.distribution, each.reason] for each in unloadable()],
}))
"""


def outcome_with(
    folder: Path, module: str = "", points: dict[str, str] | None = None, **environment: str
) -> dict[str, Any]:
    """Returns the program's output if a third party's package is installed."""
    if points is not None:
        (folder / "theirs.py").write_text(module)
        info = folder / "theirs-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.5\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[moexport.readers]", *lines]))
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


READER = """
from moexport.exporter.checkpoints.readers import Reader
API = 1
MINE = Reader("mine", "*.mine", lambda path: None, lambda path: None, lambda path: ())
"""


def test_importing_moexport_looks_for_no_plugin_and_a_list_of_them_imports_none(
    tmp_path: Path,
) -> None:
    found = outcome_with(tmp_path, READER, {"mine": "theirs:MINE"})
    assert (found["before"], found["listed"]) == ([], [])
    assert found["names"] == ["mine", "orbax", "vmoe"]
    assert found["found"] == ["mine", "orbax", "vmoe"]
    assert found["unloadable"] == []


def test_without_plugins_the_core_is_alone(tmp_path: Path) -> None:
    found = outcome_with(tmp_path, READER, {"mine": "theirs:MINE"}, MOEXPORT_PLUGINS="off")
    assert (found["names"], found["found"]) == ([], [])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
        (READER.replace("API = 1", "API = 2"), "theirs is for API 2, but this moexport has API 1"),
        (READER.replace("API = 1", ""), "theirs is for API None"),
        ("API = 1\nMINE = 3", "theirs:MINE is not a Reader"),
        (READER.replace('"mine"', '"other"'), "theirs:MINE is not named 'mine'"),
        ("API = 1", "AttributeError"),
        ("API = 2", "theirs is for API 2"),  # whose record may have another name
        ("raise SystemExit(7)", "SystemExit: 7"),
    ],
)
def test_a_plugin_that_does_not_load_does_not_affect_others(
    module: str, reason: str, tmp_path: Path
) -> None:
    found = outcome_with(tmp_path, module, {"mine": "theirs:MINE"})
    assert found["found"] == ["orbax", "vmoe"]
    ((name, distribution, why),) = found["unloadable"]
    assert (name, distribution) == ("mine", "theirs 1.5")
    assert why.startswith(reason)


@pytest.mark.slow
def test_doctor_names_a_plugin_that_does_not_load(tmp_path: Path) -> None:
    outcome_with(tmp_path, "import nothing_of_this_name", {"mine": "theirs:MINE"})
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "moexport", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "theirs" in line]
    assert "plugin theirs 1.5: moexport.readers: mine cannot be loaded: ModuleNotFound" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "name", "other"),
    [("targets", "openvino", "moexport 0"), ("targets", "onnx", "moexport itself"),
     ("options", "cluster", "moexport 0")],
)  # fmt: skip
def test_doctor_names_a_name_that_two_claim_and_other_commands_work(
    door: str, name: str, other: str, tmp_path: Path
) -> None:
    done = outcome_of(("doctor",), tmp_path, name, "API = 1\nMINE = 3", door)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "comes from" in line]
    assert line.startswith(f"moexport.{door}: '{name}' comes from {other}")
    assert line.endswith("theirs 1.5")
    helped = outcome_of(("verify", "--help"), tmp_path, name, "API = 1\nMINE = 3", door)
    assert helped.returncode == 0, helped.stderr


@pytest.mark.slow
@pytest.mark.parametrize("points", [b"[moexport.commands]\nmine\n", b"[moexport.commands]\n\xff"])
def test_entry_points_that_cannot_be_read_affect_nothing_else(
    points: bytes, tmp_path: Path
) -> None:
    outcome_of((), tmp_path, "mine", "")
    (tmp_path / "theirs-1.5.dist-info" / "entry_points.txt").write_bytes(points)
    assert with_theirs(("verify", "--help"), tmp_path).returncode == 0
    told = with_theirs(("doctor",), tmp_path).stdout
    assert "plugin theirs: its entry_points.txt cannot be read" in told


def test_a_command_whose_plugin_is_disabled_explains_it(tmp_path: Path) -> None:
    words = ("calibrate", "x.pt", "--data", "x.npz", "-o", "t.json", "--ray", "local")
    done = subprocess.run(
        [sys.executable, "-m", "moexport", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MOEXPORT_PLUGINS": "off"},
    )
    assert done.returncode == 2
    assert "No such option: --ray" in done.stderr
    assert "MOEXPORT_PLUGINS=off disables all plugins" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("export", "w.pt", "-o", "new", "--target", "openvino"),
            "'openvino' is not one of 'onnx'",
        ),
        (("verify", "out"), "manifest.json: target is 'openvino', which no installed"),
        (("run", "out", "-i", "x.npz", "-o", "y.npz"), "hint: install the plugin that runs it"),
        (("build", "out"), "MOEXPORT_PLUGINS=off disables all plugins"),
        (
            ("run", "onnx", "-i", "x.npz", "-o", "y.npz", "--engine", "openvino"),
            "'openvino' is not one of 'onnxruntime'",
        ),
        (
            ("bench", "w.pt", "-o", "new", "--engine", "openvino"),
            "all; MOEXPORT_PLUGINS=off disables all plugins",
        ),
    ],
)
def test_a_target_whose_plugin_is_disabled_is_refused_with_a_message(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    weights = DATA / "soft_moe_lucidrains" / "weights.pt"
    model = moexport.load(weights)
    plain: dict[str, Any] = {"lowering": "dense", "verify": False}
    moexport.export(model, tmp_path / "out", target="openvino", **plain)
    moexport.export(model, tmp_path / "onnx", **plain)
    np.savez(tmp_path / "x.npz", input=np.zeros((1, 4, model.inputs[0].shape[-1]), np.float32))
    (tmp_path / "w.pt").write_bytes(weights.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "moexport", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MOEXPORT_PLUGINS": "off"},
    )
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_bundle_whose_target_is_disabled_is_still_inspected(tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    moexport.export(model, tmp_path / "out", target="openvino", lowering="dense", verify=False)
    shown = [
        subprocess.run(
            [sys.executable, "-m", "moexport", "inspect", tmp_path / "out"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "MOEXPORT_PLUGINS": plugins},
        ).stdout
        for plugins in ("on", "off")
    ]
    assert shown[0] == shown[1]
    assert "openvino" in shown[1]


def test_two_plugins_of_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    found = outcome_with(tmp_path, READER.replace("mine", "vmoe"), {"vmoe": "theirs:MINE"})
    message, hint = found["error"]
    assert "'vmoe' comes from" in message
    assert "theirs 1.5" in message
    assert "moexport 0" in message
    assert "MOEXPORT_PLUGINS=off" in hint


COMMAND = """
import time
from moexport.commands.command import Command
API = 1
MINE = Command("{name}", "Never shown.", "moexport {name} 3", "theirs:twice", 5)
def twice(number: int) -> None:
    print(2 * number)
"""


def outcome_of(
    words: tuple[str, ...], folder: Path, name: str, module: str, door: str = "commands"
) -> subprocess.CompletedProcess[str]:
    """Returns a command's output if a third party's package has a record for a door."""
    (folder / "theirs.py").write_text(module)
    info = folder / "theirs-1.5.dist-info"
    info.mkdir(exist_ok=True)
    about = "Metadata-Version: 2.1\nName: theirs\nVersion: 1.5\nSummary: Twice a number.\n"
    (info / "METADATA").write_text(about)
    (info / "entry_points.txt").write_text(f"[moexport.{door}]\n{name} = theirs:MINE\n")
    return with_theirs(words, folder)


def with_theirs(words: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Returns a command's output with the package in a folder installed."""
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    return subprocess.run(
        [sys.executable, "-m", "moexport", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )


OPTIONS = """
from dataclasses import dataclass
from typing import Annotated
from moexport.commands.options import option_for
from moexport.common.option import Panel, option
API = 1

@dataclass(frozen=True, kw_only=True)
class Options:
    {field}: int | None = option(None, "Their own.", unset="none")

def options({field}: Annotated[int | None, option_for(Options, "{field}")] = None):
    return Options({field}={field})

MINE = Panel("mine", "Theirs", ("bench", "calibrate"), Options, "theirs:options")
"""


@pytest.mark.parametrize(
    ("field", "owners"),
    [("depth", ()), ("ray", ("moexport's plugin 'cluster'", "theirs 1.5")),
     ("percentile", ("moexport itself", "theirs 1.5"))],
)  # fmt: skip
def test_options_of_plugins_have_a_panel_and_one_that_two_claim_names_both(
    field: str, owners: Sequence[str], tmp_path: Path
) -> None:
    module = OPTIONS.format(field=field)
    done = outcome_of(("calibrate", "--help"), tmp_path, "mine", module, "options")
    if owners:
        assert done.returncode == 1
        assert f"--{field} comes from {' and from '.join(owners)}" in done.stderr
    else:
        assert "Theirs:\n  --depth <int>  Their own." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "reason"),
    [('("calibrat",)', "there is no call 'calibrat'; did you mean 'calibrate'?"),
     ('("bench", "tun")', "there is no call 'tun'; did you mean 'tune'?"),
     ('("verify",)', "there is no call 'verify'; choose one of: load, inspect, export"),
     ('("serve",)', "the command 'serve' accepts no plugin options"),
     ("()", "it names no call; choose one of: load")],
)  # fmt: skip
def test_options_for_an_unknown_call_are_reported(calls: str, reason: str, tmp_path: Path) -> None:
    module = OPTIONS.format(field="depth").replace('("bench", "calibrate")', calls)
    done = outcome_of(("doctor",), tmp_path, "mine", module, "options")
    (line,) = [line for line in done.stdout.splitlines() if "theirs" in line]
    assert f"plugin theirs 1.5: moexport.options: mine cannot be loaded: {reason}" in line
    refused = with_theirs(("calibrate", "w.pt", "--depth", "3"), tmp_path)
    assert "No such option: --depth" in refused.stderr
    assert "`moexport doctor` shows why theirs 1.5 cannot be loaded" in refused.stderr


def test_options_for_a_command_of_a_plugin_are_its_options(tmp_path: Path) -> None:
    module = OPTIONS.format(field="depth").replace('("bench", "calibrate")', '("tune",)')
    done = outcome_of(("tune", "--help"), tmp_path, "mine", module, "options")
    assert "Theirs:\n  --depth <int>  Their own." in done.stdout


def test_a_command_with_options_for_an_unknown_call_does_not_load(tmp_path: Path) -> None:
    module = COMMAND.format(name="twice").replace("5)", '5, calls=("laod", "twice"))')
    done = outcome_of(("twice", "3"), tmp_path, "twice", module)
    assert done.returncode == 1
    assert "there is no call 'laod'; did you mean 'load'?" in done.stderr


def test_the_calls_that_take_options_of_plugins_are_those_of_the_core_s_commands() -> None:
    own = {call for command in COMMANDS.own for call in command.calls}
    assert own == set(CALLS)


OF_A_RUNTIME = """
from dataclasses import dataclass
from typing import Annotated
from moexport.commands.options import option_for
from moexport.common.option import Panel, option
from moexport.exporter.bundle.runtimes import RuntimeRecord
from moexport.exporter.session import Session
API = 1

@dataclass(frozen=True, kw_only=True)
class Options:
    colour: str = option("red", "The colour.")

def options(colour: Annotated[str, option_for(Options, "colour")] = "red"):
    return Options(colour=colour)

PANEL = Panel("mine", "Theirs", ("run",), Options, "theirs:options")

def opened(path, options):
    print("colour", options.of_plugins["colour"])
    return Session(path)

MINE = RuntimeRecord("mine", "Their runtime", opened, takes=("colour",))
"""


def test_a_third_party_runtime_gets_its_options_and_others_refuse_them(tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    bundle = moexport.export(model, tmp_path / "out", lowering="dense", verify=False)
    with pytest.raises(moexport.UsageError, match="devcie: no runtime has") as told:
        bundle.session(devcie="gpu")
    assert "did you mean 'device'" in str(told.value.hint)
    x, y = tmp_path / "x.npz", tmp_path / "y.npz"
    np.savez(x, input=np.zeros((1, 4, model.inputs[0].shape[-1]), np.float32))
    outcome_of((), tmp_path, "mine", OF_A_RUNTIME, "runtimes")
    with (tmp_path / "theirs-1.5.dist-info" / "entry_points.txt").open("a") as points:
        points.write("[moexport.options]\nmine = theirs:PANEL\n")
    words = ("run", str(bundle.path), "-i", str(x), "-o", str(y), "--colour", "blue")
    done = with_theirs(words, tmp_path)
    assert done.returncode == 2
    assert "colour='blue' is an option of Their runtime" in done.stderr
    done = with_theirs((*words, "--engine", "mine"), tmp_path)
    assert (done.returncode, done.stdout) == (0, "colour blue\n")
    assert y.exists()


def test_the_core_has_no_option_of_a_plugin_s_runtime() -> None:
    session = inspect.signature(Bundle.session).parameters
    own = {*session, *(field.name for field in fields(SessionOptions))}
    assert {"device", "cache", "streams"} <= of_plugins().keys()
    assert own.isdisjoint(of_plugins())


def test_a_third_party_command_is_listed_by_its_package_s_summary_and_runs(tmp_path: Path) -> None:
    module = COMMAND.format(name="twice")
    listed = outcome_of(("--help",), tmp_path, "twice", module).stdout
    last = listed.rstrip().splitlines()[-1]
    assert " ".join(last.split()) == "twice Twice a number (theirs 1.5)"
    assert outcome_of(("twice", "21"), tmp_path, "twice", module).stdout.strip() == "42"
    helped = outcome_of(("twice", "--help"), tmp_path, "twice", module).stdout
    assert "Example: moexport twice 3" in helped


IMPORTED_FLAG = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
"""


@pytest.mark.parametrize(
    "module",
    ["import nothing_of_this_name", "raise SystemExit(7)", "import torch", "API = 2"],
    ids=["broken", "ends the process", "slow", "of another version"],
)
@pytest.mark.parametrize("name", ["twice", "export"], ids=["of its own", "that clashes"])
def test_the_list_of_commands_imports_no_third_party_package(
    name: str, module: str, tmp_path: Path
) -> None:
    done = outcome_of(("--help",), tmp_path, name, IMPORTED_FLAG + module)
    assert done.returncode == 0
    assert name in done.stdout
    assert "verify" in done.stdout
    assert not (tmp_path / "imported").exists()
    if name == "twice":  # the flag is hoisted by what imports the module
        outcome_of(("twice", "3"), tmp_path, name, IMPORTED_FLAG + module)
        assert (tmp_path / "imported").exists()


def test_a_command_that_does_not_load_names_its_package(tmp_path: Path) -> None:
    done = outcome_of(("twice", "3"), tmp_path, "twice", "import nothing_of_this_name")
    assert done.returncode == 1
    assert "theirs 1.5 cannot be loaded: ModuleNotFoundError" in done.stderr
    assert "MOEXPORT_PLUGINS=off" in done.stderr


def test_an_unexpected_error_names_the_package_whose_plugin_was_running(tmp_path: Path) -> None:
    module = COMMAND.format(name="twice").replace("print(2 * number)", "print(number / 0)")
    done = outcome_of(("twice", "3"), tmp_path, "twice", module)
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero (while the plugin theirs 1.5 was running)" in (
        done.stderr
    )
    assert "a bug in the plugin or in moexport" in done.stderr
    assert "MOEXPORT_PLUGINS=off" in done.stderr


@pytest.mark.parametrize("name", ["export", "tune"])
def test_a_name_that_two_commands_claim_runs_neither_and_the_others_work(
    name: str, tmp_path: Path
) -> None:
    module = COMMAND.format(name=name)
    done = outcome_of((name, "3"), tmp_path, name, module)
    assert done.returncode == 1
    assert f"'{name}' comes from" in done.stderr
    assert "theirs 1.5" in done.stderr
    assert "moexport" in done.stderr.partition("comes from")[2].partition("hint")[0]
    other = outcome_of(("bench", "--help"), tmp_path, name, module)
    assert (other.returncode, other.stderr) == (0, "")
    assert f"'{name}' comes from" in outcome_of(("--help",), tmp_path, name, module).stdout


def test_the_list_of_commands_has_the_first_sentence_of_each(tmp_path: Path) -> None:
    for command in COMMANDS:
        about = (inspect.getdoc(command.loaded) or "").partition("\n\n")[0]
        assert command.summary == " ".join(about.split()), command.name


def test_without_plugins_the_program_has_only_the_core_s_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moexport", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MOEXPORT_PLUGINS": "off"},
    )
    listed = [line.split()[0] for line in done.stdout.partition("Commands:\n")[2].splitlines()]
    assert " ".join(listed) == "inspect export build calibrate verify run bench report doctor"
