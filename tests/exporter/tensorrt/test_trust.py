"""An engine is code: none from elsewhere is loaded, and no cache that others write to is used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from moexport.common.files import sha256, why_not_private
from moexport.errors import BundleError, EngineError, UntrustedEngineError
from moexport.exporter.bundle.manifest import FileRecord, Manifest
from moexport.exporter.tensorrt import cuda, plan_file, trust
from moexport.exporter.tensorrt.backends import Backend
from moexport.exporter.tensorrt.plan_file import load_engine
from moexport.exporter.tensorrt.records import EngineRecord, add_to_bundle, engines_of, staging
from moexport.exporter.tensorrt.trust import check_private, find_plan, is_own, own_signature
from moexport.tests.command import run
from moexport.tests.exporter.bundle.test_bundle import change_manifest
from moexport.tests.exporter.tensorrt.engines import CARD, export, made, needs_rtx

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="permissions as Unix has them")

PLAN, LAYERS = "engine-tensorrt-rtx.plan", "engine-tensorrt-rtx.layers.json"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user who has run nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moexport"


@pytest.fixture
def engine(bundle: Path) -> Path:
    """An engine that this user built, but for its content."""
    with staging(bundle) as staged:
        (staged / PLAN).write_bytes(b"a plan")
        (staged / LAYERS).write_text(json.dumps({"layers": []}))
        files = {name: FileRecord.of(staged / name) for name in (PLAN, LAYERS)}
        record = EngineRecord(
            file=PLAN,
            graph="model.onnx",
            flavour="tensorrt-rtx",
            version="1.7",
            compute_capabilities=["8.9"],
            device=None,
            precision={},
            profiles=[{"input": [[1, 3, 32, 32]] * 3}],
            options={},
            settings={},
            layers=LAYERS,
            key="k",
            seconds=0.0,
            peak_memory_bytes=0,
            signature=own_signature(files[PLAN].sha256),
        )
        add_to_bundle(bundle, [made(record, files)], staged)
    return bundle / PLAN


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is looked at before an engine is loaded is well."""
    monkeypatch.setattr(plan_file, "check_runs_here", lambda _: None)
    monkeypatch.setattr(cuda, "check_device", lambda: None)

    def never(_: object) -> None:
        raise AssertionError("an engine was about to be loaded")

    monkeypatch.setattr(Backend, "load", never)


def test_an_engine_that_this_user_built_here_is_trusted(engine: Path) -> None:
    assert find_plan(engine).trusted


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_engine_from_elsewhere_needs_trust_engine(
    engine: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))  # another user, or machine
    with pytest.raises(UntrustedEngineError, match="was not built by you on this machine") as found:
        load_engine(find_plan(engine))
    assert "--trust-engine" in (found.value.hint or "")
    with pytest.raises(AssertionError, match="about to be loaded"):
        load_engine(find_plan(engine, trust=True))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("signature", ["", "0" * 64])
def test_a_signature_cannot_be_made_up(signature: str, engine: Path) -> None:
    change_manifest(engine.parent, lambda m: m["engines"][0].update(signature=signature))
    with pytest.raises(UntrustedEngineError):
        load_engine(find_plan(engine))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_signature_is_of_one_engine_alone(engine: Path) -> None:
    """Who exchanges the plan may write its hash into the manifest, and not sign it."""
    engine.write_bytes(b"an evil plan")
    other = {"sha256": sha256(engine), "bytes": engine.stat().st_size}
    change_manifest(engine.parent, lambda m: m["files"].update({PLAN: other}))
    with pytest.raises(UntrustedEngineError):
        load_engine(find_plan(engine))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_was_hashed_is_what_is_loaded(engine: Path) -> None:
    plan = find_plan(engine)
    engine.write_bytes(b"an evil plan")
    with pytest.raises(EngineError, match="was replaced while it was being loaded"):
        load_engine(plan)


def test_the_key_is_this_users_alone(home: Path) -> None:
    signed = own_signature("text")
    assert is_own(signed, "text")
    assert not is_own(signed, "other")
    assert not is_own("", "")
    assert (home / "key").stat().st_mode & 0o777 == 0o600
    assert (home / "key").stat().st_size == trust.KEY_BYTES
    (home / "key").chmod(0o644)
    assert own_signature("text") == ""
    (home / "key").chmod(0o600)
    home.chmod(0o777)
    assert own_signature("text") == ""


def test_a_folder_is_private_where_nobody_else_can_put_files(tmp_path: Path) -> None:
    inner = tmp_path / "above" / "inner"
    inner.mkdir(parents=True)
    assert why_not_private(inner) is None
    assert why_not_private(tmp_path / "nowhere") is None
    inner.chmod(0o770)
    assert "inner (mode 770)" in (why_not_private(inner) or "")
    inner.chmod(0o700)
    inner.parent.chmod(0o777)
    assert "above (mode 777)" in (why_not_private(inner) or "")
    inner.parent.chmod(0o1777)
    assert why_not_private(inner) is None


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir(mode=0o700)
    check_private(tmp_path / "engines")
    (tmp_path / "engines").chmod(0o777)
    with pytest.raises(EngineError, match=r"others may write to .*engines \(mode 777\)") as found:
        check_private(tmp_path / "engines")
    assert f"chmod go-w {tmp_path / 'engines'}" in (found.value.hint or "")


@needs_rtx
def test_a_build_does_not_take_engines_from_such_a_cache(tmp_path: Path) -> None:
    bundle = export("soft_moe_fkodom", tmp_path, "--k", "2", "--lowering", "gather")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines").chmod(0o777)
    outcome = run("build", bundle, *CARD, "--engine-cache", tmp_path / "engines")
    assert outcome.code == 1
    assert "but an engine is code" in outcome.error
    assert Manifest.read(bundle).engines == []
    (tmp_path / "engines").chmod(0o755)
    assert run("build", bundle, *CARD, "--engine-cache", tmp_path / "engines").code == 0
    assert find_plan(bundle / PLAN).trusted


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../engine.plan"},
        {"layers": "/etc/passwd"},
        {"graph": ""},
        {"profiles": []},
        {"profiles": [{"input": 1}]},
        {"profiles": [{"a": [[1]], "b": [[1]]}]},
        {"version": None},
        {"precision": [1]},
    ],
)
def test_a_record_that_is_none_is_an_error(change: dict[str, Any], engine: Path) -> None:
    change_manifest(engine.parent, lambda m: m["engines"][0].update(change))
    with pytest.raises(BundleError, match="not a complete manifest"):
        engines_of(Manifest.read(engine.parent))
