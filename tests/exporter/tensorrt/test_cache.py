"""Engines are kept under a key of everything that makes them, and damaged ones are thrown away."""

from __future__ import annotations

import hashlib
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from moexport.exporter.tensorrt import cache
from moexport.exporter.tensorrt.worker import Compiled, Product

KEY = "a" * 64


def compiled(**settings: Any) -> Compiled:
    product = Product(name="a", kind="matrix_multiply", precision="fp16")
    return Compiled(version="1", settings=settings, layers=[product], inspector=None)


def kept(folder: Path, content: bytes = b"plan", key: str = KEY) -> Path:
    plan = folder / "new.plan"
    plan.write_bytes(content)
    cache.store(folder / "cache", key, plan, hashlib.sha256(content).hexdigest(), compiled())
    return folder / "cache"


def test_what_was_kept_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out.plan"
    found = cache.fetch(kept(tmp_path), KEY, out)
    assert found == compiled()
    assert found.precision == {"fp16": 1}
    assert out.read_bytes() == b"plan"
    assert cache.fetch(tmp_path / "cache", "b" * 64, out) is None
    assert cache.fetch(tmp_path / "nowhere", KEY, out) is None


@pytest.mark.parametrize("suffix", [".plan", ".json"])
def test_a_damaged_engine_is_removed(suffix: str, tmp_path: Path) -> None:
    folder = kept(tmp_path)
    (folder / f"{KEY}{suffix}").write_bytes(b"other")
    assert cache.fetch(folder, KEY, tmp_path / "out.plan") is None
    assert list(folder.iterdir()) == []


def test_the_key_is_of_everything(tmp_path: Path) -> None:
    parts = {"files": {"model.onnx": "1"}, "version": "1.7", "cards": ["8.9"]}
    key = cache.engine_key(parts)
    assert key == cache.engine_key(dict(reversed(parts.items())))
    for name, other in {"files": {}, "version": "1.8", "cards": []}.items():
        assert cache.engine_key(parts | {name: other}) != key


def test_the_oldest_engines_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_BYTES", 10)
    for key in ("1" * 64, "2" * 64, "3" * 64):
        folder = kept(tmp_path, b"12345", key)
    assert cache.fetch(folder, "1" * 64, tmp_path / "out.plan") is None
    assert cache.fetch(folder, "2" * 64, tmp_path / "out.plan") is not None
    assert cache.fetch(folder, "3" * 64, tmp_path / "out.plan") is not None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    plan = tmp_path / "new.plan"
    plan.write_bytes(b"plan")
    cache.store(tmp_path / "cache", KEY, plan, "", compiled())
    assert (tmp_path / "cache").read_text() == "a file"


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files as Unix does")
def test_what_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    plan = tmp_path / "new.plan"
    plan.write_bytes(b"plan")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    try:  # the engine fits, and what is written down beside it does not
        cache.store(tmp_path / "cache", KEY, plan, "", compiled(long="x" * (5 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path))
    assert cache.default_cache() == tmp_path
    monkeypatch.setenv(cache.CACHE_ENV, "off")
    assert cache.default_cache() is None
    monkeypatch.delenv(cache.CACHE_ENV)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache.default_cache() == tmp_path / "moexport" / "engines"
