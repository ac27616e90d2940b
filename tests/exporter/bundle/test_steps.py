"""Steps of an export: plugins add files to the bundles of models that name them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import moexport
import pytest
from moexport.commands.options import option_for
from moexport.common import registry
from moexport.common.option import PANELS, Mistake, Panel, changed, option, refuse_changed
from moexport.errors import PluginError, UsageError
from moexport.exporter.bundle.manifest import FileRecord, Manifest
from moexport.exporter.bundle.steps import STEPS, Export, Step
from moexport.exporter.job import writes_text
from moexport.exporter.model import Host, Model
from moexport.exporter.options import ExportOptions
from moexport.tests.recorded import DATA

API = registry.API
WEIGHTS = DATA / "soft_moe_lucidrains" / "weights.pt"


def finish(job: Export, directory: Path, manifest: Manifest) -> Manifest:
    file = directory / "mine.txt"
    file.write_text(job.model.family)
    files = {**manifest.files, file.name: FileRecord.of(file)}
    notes = [*manifest.notes, "mine was here"]
    return replace(manifest, files=files, notes=notes, plugins={"mine": {"words": 3}})


def check(options: ExportOptions, model: Model | None) -> Iterator[Mistake]:
    if model is not None and writes_text(model, options):
        yield "mine: is not for texts", "leave it out"


def refuse(options: ExportOptions, model: Model | None) -> Iterator[Mistake]:
    del options
    if model is not None:
        yield f"never: is for no {model.family}", "leave it out"


MINE = Step("mine", check=check, finish=finish, contents={"mine.txt": "what mine wrote"})
NEVER = Step("never", check=refuse, finish=finish)


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """An option of a plugin that stands for one of the core's."""

    twice: int | None = option(None, "Half of the experts to compute.", unset="none")


def doubling(twice: Annotated[int | None, option_for(Doubling, "twice", min=1)] = None) -> Doubling:
    return Doubling(twice=twice)


DOUBLING = Panel("doubling", "Theirs", ("export",), Doubling, f"{__name__}:doubling")


def doubled(options: ExportOptions) -> ExportOptions:
    refuse_changed(options, ("k",), " with --twice: it says k")
    return replace(options, k=2 * (options.asked(Doubling).twice or 0))


def few(options: ExportOptions, model: Model | None) -> Iterator[Mistake]:
    del model
    if options.k == 0:
        yield "--twice: nothing is computed", "leave it out"


TWICE = Step(
    "twice",
    requested=lambda options: changed(options.asked(Doubling)) != [],
    change=doubled,
    check=few,
)


def naming(model: Model, *names: str) -> Model:
    """The model as of a loader that names steps."""

    class Naming(Host):
        steps = names

    return replace(model, source=replace(model.source, host=Naming()))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model, beside a plugin with three steps, of which one has an option."""
    names = [*((name, STEPS.group) for name in ("mine", "never", "twice"))]
    names.append(("doubling", PANELS.group))
    entries = tuple(
        registry.Entry(
            EntryPoint(name, f"{__name__}:{name.upper()}", group), "theirs 1.5", "", False
        )
        for name, group in names
    )
    monkeypatch.setattr(registry, "_found", lambda: entries)
    return moexport.load(WEIGHTS)


def test_a_step_that_a_model_names_adds_files_that_the_bundle_lists_and_watches(
    model: Model, tmp_path: Path
) -> None:
    plain = moexport.export(model, tmp_path / "plain", verify=False)
    named = naming(model, "mine")
    bundle = moexport.export(named, tmp_path / "out", verify=False)
    *graphs, page = plain.manifest.files
    assert [*bundle.manifest.files] == [*graphs, "mine.txt", page]
    assert bundle.manifest.notes == [*plain.manifest.notes, "mine was here"]
    assert "| what mine wrote |" in (bundle.path / "README.md").read_text(encoding="utf-8")
    (bundle.path / "mine.txt").write_text("damaged")
    failed = [check.name for check in bundle.verify() if not check.passed]
    assert [name for name in failed if "hash" in name] == ["hash of mine.txt"]


@pytest.mark.slow
def test_what_a_step_adds_to_a_manifest_is_kept_where_engines_are_added(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    named = naming(model, "mine")
    moexport.export(named, tmp_path / "out", target="tensorrt-rtx", engine=False, verify=False)
    monkeypatch.setattr(registry, "_found", tuple)  # as where the plugin is not installed
    bundle = moexport.build(tmp_path / "out")
    assert len(bundle.manifest.engines) == 1
    assert bundle.manifest.plugins == {"mine": {"words": 3}}
    assert Manifest.read(tmp_path / "out").plugins == {"mine": {"words": 3}}


def test_what_a_step_refuses_is_refused_before_any_work(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="never: is for no soft-moe"):
        moexport.export(naming(model, "mine", "never"), tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def test_an_option_of_a_plugin_changes_those_of_the_export(model: Model, tmp_path: Path) -> None:
    options: dict[str, Any] = {"twice": 1, "verify": False}
    bundle = moexport.export(model, tmp_path / "out", **options)
    assert [layer.k for layer in bundle.manifest.layers] == [2] * len(model.layers)
    with pytest.raises(UsageError, match="k=… with twice=…: it says k"):
        moexport.export(model, tmp_path / "both", k=4, **options)
    never: dict[str, Any] = {"twice": 0}
    with pytest.raises(UsageError, match="twice=…: nothing is computed"):
        moexport.export(not_loaded, tmp_path / "none", **never)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out"]


def not_loaded() -> Model:
    raise AssertionError("what needs no model is refused before it is loaded")


def test_a_bundle_is_opened_without_the_plugin_of_its_files(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = naming(model, "mine")
    bundle = moexport.export(named, tmp_path / "out")
    monkeypatch.setattr(registry, "_found", tuple)
    assert all(check.passed for check in moexport.Bundle.open(bundle.path).verify())
    with pytest.raises(PluginError, match="no installed package provides 'mine'"):
        moexport.export(named, tmp_path / "other")


def test_a_layout_without_plugins_is_refused_in_words(tmp_path: Path) -> None:
    words = ("export", WEIGHTS, "-o", tmp_path / "out", "--layout", "optimum")
    done = subprocess.run(
        [sys.executable, "-m", "moexport", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MOEXPORT_PLUGINS": "off"},
    )
    assert done.returncode == 2
    assert "No such option: --layout" in done.stderr
    assert "MOEXPORT_PLUGINS=off disables all plugins" in done.stderr
    assert not [*tmp_path.iterdir()]
