"""Plugins add kinds of layer and families; without plugins, the core still works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLUGIN = """
from dataclasses import replace
import torch
from moexport.exporter.families import FAMILIES
from moexport.graphs.lowerings import KINDS
from moexport.graphs.lowerings.base import FurtherLowering, KindRecord

API = 1
(dense, *_) = KINDS["soft-moe"].lowerings
KIND = KindRecord("mine", (dense, replace(dense, name="my-way")))
WAY = FurtherLowering("soft-moe", replace(dense, name="in-turn"))
SAME, BESIDE = FurtherLowering("soft-moe", dense), FurtherLowering("mumoe", dense)

def family(name, after=""):
    fits = lambda tensors: "of.mine" in tensors
    return replace(FAMILIES["mumoe"], name=name, detect=fits, after=after)

FIRST, SECOND = family("first-of-mine", after="soft-moe-vit"), family("second-of-mine")
"""

HELPERS = """
import json, sys
import moexport, torch
from moexport.common.registry import unloadable
from moexport.exporter.families import FAMILIES, all_names, detect, family_named
from moexport.graphs.lowerings import (
    KINDS, all_names as all_lowerings, check_name, kinds_with, lowering_of, lowerings_of
)
from moexport.tests.exporter.families.states import lucidrains_state

def of(call):
    try:
        return call()
    except moexport.MoexportError as error:
        return [type(error).__name__, error.message, error.hint]

def tensors(*keys):
    return {key: torch.ones(1) for key in keys}

def loaded():
    rooms = ("theirs", "moexport.plugins", KINDS_PLACE, FAMILIES_PLACE)
    return [name for name in sys.modules if name.startswith(rooms)]
"""

PLACES = {
    "KINDS_PLACE": "moexport.plugins.token_routed.lowerings",
    "FAMILIES_PLACE": "moexport.plugins.token_routed.vmoe",
}


def found(
    folder: Path, expression: str, points: str = "", module: str = PLUGIN, **environment: str
) -> Any:
    """Returns the value of an expression if a third party's package is installed."""
    (folder / "theirs.py").write_text(module)
    info = folder / "theirs-1.5.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(points)
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)])
    places = "\n".join(f"{name} = {place!r}" for name, place in PLACES.items())
    done = subprocess.run(
        [sys.executable, "-c", f"{HELPERS}\n{places}\nprint(json.dumps({expression}))"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


KIND = "[moexport.kinds]\nmine = theirs:KIND\n"
FIRST = "[moexport.families]\nfirst-of-mine = theirs:FIRST\n"
BOTH = f"{FIRST}second-of-mine = theirs:SECOND\n"


def test_a_kind_of_a_plugin_has_its_lowerings(tmp_path: Path) -> None:
    expression = """[
        [*lowerings_of("mine")], of(lambda: check_name("my-way")), [*kinds_with("dense")],
        KINDS.names,
    ]"""
    own, checked, dense, names = found(tmp_path, expression, KIND)
    assert own == ["dense", "my-way"]
    assert checked is None
    assert dense == ["soft-moe", "experts", "mine"]
    assert names == ["soft-moe", "mumoe", "experts", "mine"]


def test_a_layer_and_a_lowering_of_the_core_load_no_plugin(tmp_path: Path) -> None:
    expression = """[
        [*lowerings_of("soft-moe")], [*lowerings_of("mumoe")], check_name("gathered"),
        FAMILIES.names, family_named("mumoe").name, loaded(),
    ]"""
    assert found(tmp_path, expression, KIND + FIRST)[-1] == []


def lowering(name: str, record: str) -> str:
    """Returns the entry point of a lowering for an existing kind."""
    return f"[moexport.lowerings]\n{name} = theirs:{record}\n"


def test_a_lowering_of_a_plugin_is_used_if_it_is_named(tmp_path: Path) -> None:
    expression = """[
        "in-turn" in lowerings_of("soft-moe"), lowering_of("soft-moe", "dense").name,
        "in-turn" in all_lowerings(), "theirs" in sys.modules,
        check_name("in-turn"), lowering_of("soft-moe", "in-turn").name,
        lowering_of("mumoe", "in-turn"), [*kinds_with("in-turn")],
    ]"""
    listed, own, named, loaded, *rest = found(tmp_path, expression, lowering("in-turn", "WAY"))
    assert (listed, own, named, loaded) == (False, "dense", True, False)
    assert rest == [None, "in-turn", None, ["soft-moe"]]


def test_two_lowerings_of_a_kind_with_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    expression = """[
        of(lambda: lowering_of("soft-moe", "dense")), [*lowerings_of("soft-moe")][0],
        lowering_of("soft-moe", "gather").name,
    ]"""
    (kind, message, hint), *others = found(tmp_path, expression, lowering("dense", "SAME"))
    assert (kind, others) == ("PluginError", ["dense", "gather"])
    said = "the lowering 'dense' of soft-moe layers comes from moexport itself and from theirs 1.5"
    assert (message, hint) == (said, "uninstall one of them, or choose another lowering")


def test_a_lowering_of_a_plugin_may_have_the_name_of_one_of_another_kind(tmp_path: Path) -> None:
    expression = '[lowering_of(kind, "dense").name for kind in ("soft-moe", "mumoe")]'
    assert found(tmp_path, expression, lowering("dense", "BESIDE")) == ["dense", "dense"]


def test_without_plugins_their_kinds_are_refused_and_the_hint_explains_why(tmp_path: Path) -> None:
    expression = """[
        of(lambda: lowerings_of("experts")), of(lambda: check_name("slots")),
        of(lambda: family_named("vmoe-vit")), of(lambda: detect(tensors("embedding.kernel"))),
    ]"""
    kind, lowering, family, detected = found(tmp_path, expression, MOEXPORT_PLUGINS="off")
    assert kind[:2] == ["PluginError", "moexport.kinds: no installed package provides 'experts'"]
    assert lowering[:2] == ["LoweringError", "there is no lowering 'slots'"]
    assert family[:2] == ["FamilyError", "unknown family 'vmoe-vit'"]
    assert detected[0] == "FamilyError"
    for _, _, hint in (kind, lowering, family, detected):
        assert "MOEXPORT_PLUGINS=off" in hint


def test_a_family_of_a_plugin_is_found_and_listed_in_its_place(tmp_path: Path) -> None:
    expression = """[
        detect(tensors("of.mine")).name, all_names(), of(lambda: family_named("mine")),
    ]"""
    name, names, unknown = found(tmp_path, expression, FIRST)
    assert name == "first-of-mine"
    assert names[:2] == ["soft-moe-vit", "first-of-mine"]
    assert ", ".join(names) in unknown[2]


def test_a_checkpoint_of_the_core_is_not_shown_to_plugins(tmp_path: Path) -> None:
    name, modules = found(tmp_path, "[detect(lucidrains_state()).name, loaded()]", FIRST)
    assert (name, modules) == ("soft-moe-pytorch", [])


def test_the_user_chooses_between_two_plugins_that_accept_one_checkpoint(tmp_path: Path) -> None:
    _, message, hint = found(tmp_path, 'of(lambda: detect(tensors("of.mine")))', BOTH)
    assert message == "the checkpoint fits several families: first-of-mine, second-of-mine"
    assert "--family first-of-mine" in hint


@pytest.mark.parametrize("module", ["API = 1", PLUGIN.replace("API = 1", "API = 2")])
def test_a_plugin_of_another_version_does_not_affect_others(module: str, tmp_path: Path) -> None:
    expression = """[
        KINDS.names, [kind.name for kind in KINDS], [family.name for family in FAMILIES],
        [each.name for each in unloadable()],
    ]"""
    names, kinds, families, failed = found(tmp_path, expression, KIND + BOTH, module)
    assert names == [*kinds, "mine"]
    assert "vmoe-vit" in families
    assert failed == ["mine", "first-of-mine", "second-of-mine"]


NAMES = """
import json, sys
from moexport.exporter.families import FAMILIES, check_family
from moexport.exporter.options import parse_lowerings
from moexport.graphs.lowerings import KINDS
parse_lowerings("dense,gathered,slots")
check_family("mumoe"), check_family("vmoe-vit")
names = [FAMILIES.names, *(list(kind.by_name) for kind in KINDS)]
alone = "torch" not in sys.modules
records = [list(FAMILIES), *(kind.lowerings for kind in KINDS)]
print(json.dumps([alone, names, [[each.name for each in several] for several in records]]))
"""


def test_names_that_are_known_without_pytorch_are_those_of_the_records() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
    alone, names, of_records = json.loads(done.stdout)
    assert alone
    assert names == of_records
