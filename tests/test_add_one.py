"""CONTRIBUTING.md's steps to add a family, a lowering, a target and an engine work as written.

Each is done in a copy of the sources, in only the files that CONTRIBUTING.md names, and tried in a
separate process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.tests.recorded import VIT_SETS, read_case

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CASE = read_case("soft_moe_vit")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "node_modules", "results")
MOST_FILES = 3
LISTED = "tests/docs/test_lowerings_page.py"


@dataclass(frozen=True)
class Copy:
    """A copy of the sources, and the files that were changed in it."""

    parent: Path

    @property
    def root(self) -> Path:
        return self.parent / "moexport"

    def write(self, file: str, text: str) -> None:
        """Writes a new file."""
        assert not (self.root / file).exists()
        (self.root / file).write_text(text, encoding="utf-8")

    def insert(self, file: str, before: str, text: str) -> None:
        """Inserts text before a text that a file has exactly once."""
        whole = (self.root / file).read_text(encoding="utf-8")
        assert whole.count(before) == 1, (file, before)
        (self.root / file).write_text(whole.replace(before, text + before), encoding="utf-8")

    def changed(self) -> set[str]:
        """Returns the files that differ from the sources."""
        files = (each for each in self.root.rglob("*") if each.suffix in (".py", ".md"))
        names = (str(each.relative_to(self.root)) for each in files)
        return {
            name
            for name in names
            if not (ROOT / name).exists()
            or (ROOT / name).read_bytes() != (self.root / name).read_bytes()
        }

    def python(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Runs Python with the copy as `moexport`."""
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.parent,
            env={**os.environ, "PYTHONPATH": str(self.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def run(self, *arguments: object) -> str:
        """Runs `moexport` and returns what it printed."""
        done = self.python("-m", "moexport", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def read(self, file: str) -> str:
        """Returns the text of a file of the copy."""
        return (self.root / file).read_text(encoding="utf-8")

    def refresh(self) -> None:
        """Writes the tables of the registries, so that their test passes."""
        done = self.python("moexport/docs/refresh.py", "registries")
        assert done.returncode == 0, done.stderr
        listed = self.tests(LISTED)
        assert listed.returncode == 0, listed.stdout

    def tests(self, which: str) -> subprocess.CompletedProcess[str]:
        """Runs a file of the copy's tests."""
        return self.python("-m", "pytest", "-q", "-p", "no:cacheprovider", self.root / which)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A copy of the files that the package and its tests of documents need."""
    made = Copy(tmp_path / "copy")
    shutil.copytree(ROOT, made.root, ignore=NOT_COPIED)
    return made


def named_in_contributing(heading: str, name: str) -> set[str]:
    """Returns the files that the numbered steps under a heading of CONTRIBUTING.md name."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (part,) = [each for each in text.split("\n## ") if each.startswith(f"{heading}\n")]
    steps = re.findall(r"^\d\. `([^`]+)`", part, re.MULTILINE)
    return {step.replace("NAME", name) for step in steps}


FAMILY = r'''"""`soft-moe-renamed`: the ViT of bwconrad/soft-moe under other key names."""

from __future__ import annotations

from . import vit
from .base import renamed

FAMILY = renamed(
    vit.FAMILY,
    name="soft-moe-renamed",
    summary="the ViT of bwconrad/soft-moe under other names",
    keys={r"encoder\.layer\.": "blocks.", r"\.moe\.slots": ".moe.phi", r"\.moe\.": ".mlp."},
)
'''


def test_a_family_for_a_vit_with_other_key_names(copy: Copy, tmp_path: Path) -> None:
    state = torch.load(CASE.weights)
    renamed = {
        key.replace("blocks.", "encoder.layer.")
        .replace(".mlp.phi", ".moe.slots")
        .replace(".mlp.", ".moe."): tensor
        for key, tensor in state.items()
    }
    assert not renamed.keys() & {key for key in state if key.startswith("blocks.")}
    checkpoint = tmp_path / "renamed.pt"
    torch.save(renamed, checkpoint)
    assert "no known family" in copy.python("-m", "moexport", "inspect", checkpoint).stderr

    copy.write("exporter/families/renamed.py", FAMILY)
    copy.insert(
        "exporter/families/__init__.py",
        '    "soft-moe-mnist": ',
        '    "soft-moe-renamed": "renamed:FAMILY",\n',
    )
    copy.insert("docs/families.md", "### `soft-moe-mnist`", "### `soft-moe-renamed`\n\nA ViT.\n\n")
    assert copy.changed() == named_in_contributing("To add a family", "renamed")
    assert len(copy.changed()) <= MOST_FILES

    assert json.loads(copy.run("inspect", checkpoint, *VIT_SETS, "--json"))["family"] == (
        "soft-moe-renamed"
    )
    bundle = tmp_path / "out"
    copy.run("export", checkpoint, "-o", bundle, *VIT_SETS, "--k", 2)
    assert json.loads(copy.run("verify", bundle, "--json"))["passed"] is True
    np.savez(tmp_path / "x.npz", input=CASE.x)
    copy.run("run", bundle, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as outputs:
        np.testing.assert_allclose(outputs["output"], CASE.y(2), rtol=1e-3, atol=1e-5)


LOWERING = '''"""`masked`: every expert is computed, as `dense` has it."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.stored import SoftMoELayer
from . import dense
from .base import Lowering, SoftMoEPlan
from ..targets import Machine


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer for tokens x [b, m, d]; returns y [b, m, o]."""
    return b.op("Identity", dense.build(b, layer, x), name="combine/masked")


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """A node more than `dense`."""
    return dense.predict_us(plan, machine) + machine.node_us


LOWERING = Lowering(
    name="masked",
    summary="as dense, with a node more",
    build=build,
    predict_us=predict_us,
)
'''


def test_a_lowering(copy: Copy, tmp_path: Path) -> None:
    copy.write("graphs/lowerings/masked.py", LOWERING)
    copy.insert(
        "graphs/lowerings/__init__.py", '    "gather": ', '    "masked": "masked:LOWERING",\n'
    )
    assert copy.changed() == named_in_contributing("To add a lowering", "masked")
    copy.refresh()
    assert "`masked` | all | as dense, with a node more |" in copy.read("docs/lowerings.md")
    assert "## masked\n" in copy.read("docs/evidence/lowerings.md")

    bundle = tmp_path / "out"
    copy.run("export", CASE.weights, "-o", bundle, *VIT_SETS, "--k", 2, "--lowering", "masked")
    assert json.loads(copy.run("verify", bundle, "--json"))["passed"] is True


TARGET = """    TargetRecord(
        "ort-board",
        ON_CPU,
        "standard",
        provider=CPU_PROVIDER,
        summary="a board",
        data_sizes=False,
        branches=False,
        refused=NO_FP8,
    ),
"""


def test_a_target_in_a_runtime_that_is_known(copy: Copy, tmp_path: Path) -> None:
    copy.insert("graphs/targets.py", '    TargetRecord(\n        "ort-cuda",\n', TARGET)
    assert copy.changed() == {"graphs/targets.py"}
    assert "graphs/targets.py" in named_in_contributing("To add a target", "ort-board")
    copy.refresh()
    for page in ("README.md", "docs/deploy.md"):
        assert "| `ort-board` | a board | standard | fp32, " in copy.read(page), page

    bundle, options = tmp_path / "out", (*VIT_SETS, "--k", 2, "--target", "ort-board")
    copy.run("export", CASE.weights, "-o", bundle, *options)
    assert json.loads(copy.run("verify", bundle, "--json"))["passed"] is True
    assert json.loads((bundle / "manifest.json").read_text())["target"] == "ort-board"
    refused = copy.python(
        *("-m", "moexport", "export", CASE.weights, "-o", tmp_path / "grouped", *options),
        *("--lowering", "grouped"),
    )
    assert "the target ort-board does not support it" in refused.stderr


RUNNER = '''"""`zeros`: a runtime that computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...data.batches import Array
from ...exporter.inputs import Inputs
from .base import GraphLoader, Runner, first_of


class Zeros(Runner):
    """Gives zeros in place of a classifier's outputs."""

    def infer(self, x: Inputs, output: int = 0) -> Array:
        """Maps inputs [b, …] to zeros [b, 10]."""
        return np.zeros((len(first_of(x)), 10), np.float32)


@dataclass(frozen=True)
class ZerosLoader(GraphLoader[Zeros]):
    """Opens no file."""

    def open_graph(self, observed: Mapping[str, str], experts: Mapping[str, int]) -> Zeros:
        """Returns the runner, which chooses nothing."""
        return Zeros()
'''

LOADER = """def _zeros(graph: GraphFile) -> Loader:
    from .runners.zeros import ZerosLoader

    return ZerosLoader(graph)


"""

RECORD = """    GraphEngine(
        name="zeros",
        title="Zeros",
        requires=(installed("run in zeros", "numpy", "NumPy", "cpu"),),
        serves="one-input",
        loader=_zeros,
        target="onnx",
    ),
"""


def test_an_engine_that_computes_something_else_is_a_row_with_an_error(
    copy: Copy, tmp_path: Path
) -> None:
    copy.write("bench/runners/zeros.py", RUNNER)
    copy.insert("bench/engines.py", "# --- requirements ", LOADER)
    copy.insert("bench/engines.py", '    _tensorrt_engine("tensorrt", ', RECORD)
    assert copy.changed() == named_in_contributing("To add an engine of `bench`", "zeros")
    copy.refresh()
    assert "| `zeros` | Zeros | – |" in copy.read("docs/bench.md")

    out = tmp_path / "report"
    printed = copy.run(
        *("bench", CASE.weights, "-o", out, *VIT_SETS, "--k", "2", "--engine", "zeros,onnxruntime"),
        *("--samples", 8, "--no-memory", "--rounds", 5),
    )
    rows = {row["engine"]: row for row in json.loads((out / "results.json").read_text())["rows"]}
    assert rows["onnxruntime"]["error"] is None
    assert rows["onnxruntime"]["parity"]["cosine"] > 0.999
    assert rows["zeros"]["parity"]["cosine"] == 0
    assert "wrong outputs" in rows["zeros"]["error"]
    assert rows["zeros"]["latency_ms"] is None
    assert re.search(r"^failed: Zeros, \w+, k = 2: wrong outputs: ", printed, re.MULTILINE)


def test_an_engine_without_a_loader_is_an_error(copy: Copy) -> None:
    without = RECORD.replace("        loader=_zeros,\n", "")
    copy.insert("bench/engines.py", '    _tensorrt_engine("tensorrt", ', without)
    done = copy.python("-m", "moexport", "doctor")
    assert done.returncode != 0
    assert "loader" in done.stderr
