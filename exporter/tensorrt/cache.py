"""The cache of finished engines: an equal request returns the same file at once.

An engine's key is a hash of all that determines it: the graph, its weights, the options, the
profiles, TensorRT's version, and the GPU if the engine is for that GPU only. A file with a wrong
hash is deleted and built again. Concurrent builds share the folder, and lock it while they read or
write an engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...common.documents import from_data, object_in
from ...common.files import cache_folder, sha256, why_not_private
from ...common.writing import locked, whole_file, write_text
from ...errors import OutputError, ResultsError
from .worker import Compiled

CACHE_ENV = "MOEXPORT_ENGINE_CACHE"
"""The environment variable that names the folder; `off` disables the cache."""

MAX_BYTES = 10 << 30
"""The least recently used engines are removed when the folder exceeds this size."""

FACTS_VERSION = 2
"""The version of the facts stored with an engine, as part of its key."""


def default_cache() -> Path | None:
    """Returns the folder from the environment, or one in the user's cache folder."""
    value = os.environ.get(CACHE_ENV)
    if value is not None:
        return None if value.strip().lower() in ("", "off") else Path(value)
    folder = cache_folder()
    return None if folder is None else folder / "engines"


def engine_key(parts: Mapping[str, Any]) -> str:
    """Returns the key of a request: SHA-256 of its canonical JSON."""
    text = json.dumps({"facts": FACTS_VERSION, **parts}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fetch(folder: Path, key: str, destination: Path) -> Compiled | None:
    """Copies the engine of a key to `destination` and returns the facts of its build.

    Returns None if there is no such engine; a damaged one is removed.
    """
    if not folder.is_dir():
        return None
    plan, facts = _files(folder, key)
    with locked(folder):
        content = object_in(facts)
        try:
            compiled = from_data(Compiled, content.get("built"), facts)
            intact = sha256(plan) == content.get("sha256")
        except (OSError, ResultsError):
            intact = False
        if not intact:
            _remove(plan, facts)
            return None
        os.utime(plan)  # marks it as recently used
        shutil.copyfile(plan, destination)
        return compiled


def private_cache() -> Path | None:
    """Returns the default folder, unless others may write to it: cached files are code."""
    folder = default_cache()
    return None if folder is None or why_not_private(folder) is not None else folder


def read_kernels(name: str) -> bytes:
    """Returns the kernels that TensorRT-RTX has compiled here for an engine; empty if none."""
    folder = private_cache()
    if folder is None:
        return b""
    try:
        with locked(folder):
            return (folder / f"{name}.kernels").read_bytes()
    except OSError:  # nothing was saved
        return b""


def store_kernels(name: str, content: bytes) -> None:
    """Saves compiled kernels for the next start of the same engine."""
    folder = private_cache()
    if folder is None:
        return
    with contextlib.suppress(OSError, OutputError):  # otherwise they will be compiled again
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder), whole_file(folder / f"{name}.kernels") as partial:
            partial.write_bytes(content)
            _make_room(folder, new=folder / f"{name}.kernels")


def store(folder: Path, key: str, plan: Path, digest: str, compiled: Compiled) -> None:
    """Copies an engine, whose SHA-256 is `digest`, and the facts of its build into the cache.

    Nothing happens if the folder is not writable. The facts are written last, because an engine
    without them is ignored.
    """
    cached, facts = _files(folder, key)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder):
            with whole_file(cached) as partial:
                shutil.copyfile(plan, partial)
            write_text(json.dumps({"sha256": digest, "built": asdict(compiled)}), facts)
            _make_room(folder, new=cached)
    except (OSError, OutputError):  # the cache is optional; the engine itself is complete
        _remove(cached, facts)


def _make_room(folder: Path, new: Path) -> None:
    files = [*folder.glob("*.plan"), *folder.glob("*.kernels")]
    files.sort(key=lambda path: path.stat().st_mtime)
    total = sum(path.stat().st_size for path in files)
    for path in files:
        if total <= MAX_BYTES:
            return
        if path != new:
            total -= path.stat().st_size
            _remove(path, path.with_suffix(".json"))


def _files(folder: Path, key: str) -> tuple[Path, Path]:
    return folder / f"{key}.plan", folder / f"{key}.json"


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # already removed, or it cannot be removed
            path.unlink()
