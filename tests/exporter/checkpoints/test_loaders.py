"""Models of no family come by a plugin's record, and their host answers for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import moexport
import onnx_ir as ir
import pytest
import torch
from moexport.common import registry
from moexport.common.option import PANELS
from moexport.errors import FamilyError, PluginError, UsageError
from moexport.exporter.checkpoints.loaders import LOADERS, loader_of
from moexport.exporter.job import export_job
from moexport.exporter.model import Host, Model
from moexport.exporter.options import ExportOptions
from moexport.exporter.trace import trace
from moexport.graphs.sizes import AxisRange
from moexport.tests.command import run
from moexport.tests.recorded import DATA
from torch import nn

WEIGHTS = DATA / "soft_moe_lucidrains" / "weights.pt"

THEIRS = f"""
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
import moexport
from moexport.commands.options import option_for
from moexport.common.option import Panel, option
from moexport.exporter.checkpoints.loaders import ModelLoader
API = 1

def finds(source):
    if isinstance(source, str):
        return "theirs" if source == "theirs:network" else None
    return "theirs" if "theirs" in (source / "config.json").read_text() else None

def loads(source, config, request):
    model = moexport.load({str(WEIGHTS)!r})
    return replace(model, family="theirs", config={{"source": str(source), **config}})

def refuses(source, request):
    options = request.asked(Options)
    if options.depth is not None and source != "theirs:network":
        raise moexport.UsageError(f"--depth: {{source}} has none")

@dataclass(frozen=True, kw_only=True)
class Options:
    depth: int | None = option(None, "How deep.")

MINE = ModelLoader("mine", finds, loads, settings=("kept",), refuses=refuses)
def typed(depth: Annotated[int | None, option_for(Options, "depth")] = None):
    return Options(depth=depth)

PANEL = Panel("mine", "Theirs", ("load",), Options, "theirs:typed")
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that a plugin's loader takes, and that plugin."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    with_points(monkeypatch, EntryPoint("mine", "theirs:MINE", LOADERS.group))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"kind": "theirs"}))
    torch.save({"a.weight": torch.zeros(2, 2)}, folder / "pytorch_model.bin")
    return folder


def with_points(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    theirs = (registry.Entry(point, "theirs 1.5", "", own=False) for point in points)
    both = (*registry._found(), *theirs)
    monkeypatch.setattr(registry, "_found", lambda: both)


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_found", tuple)


def test_a_folder_of_no_family_is_loaded_by_the_plugin_that_takes_it(theirs: Path) -> None:
    model = moexport.load(theirs, sets=["kept=3"])
    assert (model.family, model.config) == ("theirs", {"source": str(theirs), "kept": 3})


def test_the_families_of_the_core_come_first(theirs: Path) -> None:
    (theirs / "pytorch_model.bin").write_bytes(WEIGHTS.read_bytes())
    assert moexport.load(theirs).family == moexport.load(WEIGHTS).family


def test_without_a_config_no_plugin_is_asked(theirs: Path) -> None:
    assert loader_of(theirs) is not None
    (theirs / "config.json").unlink()
    assert loader_of(theirs) is None


@pytest.mark.plugins
def test_a_source_that_two_plugins_take_is_an_error_that_names_both(theirs: Path) -> None:
    with pytest.raises(
        PluginError, match="theirs:network: several plugins load it: factory and mine"
    ):
        moexport.load("theirs:network")


def test_options_of_a_loader_are_refused_beside_a_model_that_it_does_not_load(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_points(monkeypatch, EntryPoint("mine", "theirs:PANEL", PANELS.group))
    with pytest.raises(UsageError, match=r"depth=…: .*weights\.pt has none"):
        moexport.load(WEIGHTS, depth=3)
    assert moexport.load(WEIGHTS, depth=None).layers
    outcome = run("export", WEIGHTS, "-o", theirs / "out", "--depth", "3")
    assert outcome.code == 2
    assert outcome.error.startswith("--depth: ")


def test_without_plugins_code_and_unknown_folders_are_refused(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch)
    with pytest.raises(
        PluginError, match=r"theirs:network: no installed plugin loads networks"
    ) as code:
        moexport.load("theirs:network")
    with pytest.raises(FamilyError, match="no known family") as folder:
        moexport.load(theirs)
    for caught in (code, folder):
        assert caught.value.hint is not None and "MOEXPORT_PLUGINS=off" in caught.value.hint
    assert moexport.load(WEIGHTS).layers


class Asked(Host):
    """Chooses one expert whatever it is asked for, and traces what it is given another way."""

    per_token = True

    def __init__(self) -> None:
        self.asked: list[object] = []

    def with_k(self, model: Model, k: Mapping[str, int | None]) -> Model:
        self.asked.append(dict(k))
        return replace(model, notes=("asked",))

    def traced(
        self,
        network: nn.Module,
        model: Model,
        sizes: Mapping[str, int],
        fixed: Mapping[str, int],
        *,
        opset: int,
    ) -> ir.Model | None:
        self.asked.append((type(network), opset))
        return super().traced(network, model, sizes, fixed, opset=opset)

    def with_token_axis(self, model: Model, option: str) -> Model:
        self.asked.append(option)
        shape = ("batch", "tokens", *model.input.shape[2:])
        return replace(model, inputs=(replace(model.input, shape=shape),))


def test_the_host_is_asked_for_k_for_an_axis_and_for_a_trace() -> None:
    host = Asked()
    loaded = moexport.load(WEIGHTS)
    model = replace(loaded, source=replace(loaded.source, host=host))
    (name,) = model.layers
    fixed = replace(model, inputs=(replace(model.input, shape=("batch", 4, 16)),))
    job = export_job(fixed, ExportOptions(k=2, tokens=AxisRange(1, 4, 8)))
    assert host.asked == ["--tokens 1:4:8", {name: 2}]
    assert job.model.notes == ("asked",)
    host.asked.clear()
    graph = trace(model, opset=21)
    assert host.asked == [(type(model.module), 21)]
    assert graph.graph.inputs[0].name == model.input.name
    assert [layer.tokens for layer in moexport.inspect(model, tokens=9).layers] == [9]
