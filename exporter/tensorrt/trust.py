"""Trust in engines: an engine is loaded only if the user built it here, or explicitly trusts it.

A plan is code that TensorRT runs. It must be byte for byte the file that the bundle's manifest
lists, with a signature that only this user can make. Cache folders that others can write to are not
used.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ...common.files import cache_folder, known_sha256, why_not_private
from ...common.writing import locked, whole_file
from ...errors import EngineError, OutputError, UntrustedEngineError
from ..bundle.manifest import MANIFEST_FILE, FileRecord, Manifest
from .backends import BACKENDS, TENSORRT_RTX, Backend, backend_named
from .records import EngineRecord, engines_of

TRUST = "--trust-engine loads it anyway; use this only for your own files"

MAGIC = {b"vtrt": TENSORRT_RTX}
"""The first bytes of a plan of TensorRT-RTX 1.7.1; others are recognised by their records."""

SIZE_AT, VERSION_AT, HEADER_BYTES = 16, 24, 64
"""Offsets of such a plan's size (8 bytes, little-endian) and version (4), and the header's size."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan file, its record if a manifest lists it, and its SHA-256 if that must match.

    `version` is the version of the backend, from the start of the file, if known. `trusted` tells
    whether this user built the plan here, or trusts it.
    """

    path: Path
    record: EngineRecord | None
    backend: Backend
    trusted: bool = False
    sha256: str | None = None
    version: str | None = None


def _header(path: Path) -> tuple[Backend, str, int] | None:
    """Returns the backend, version and size in a plan's header; None if the header is unknown."""
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    backend = MAGIC.get(start[:4])
    if backend is None or len(start) < HEADER_BYTES:
        return None
    size = int.from_bytes(start[SIZE_AT : SIZE_AT + 8], "little")
    version = ".".join(str(number) for number in start[VERSION_AT : VERSION_AT + 4])
    return backend, version, size


def find_plan(path: Path, *, trust: bool = False) -> PlanFile:
    """Returns a plan that may be loaded.

    Raises `EngineError` for a plan that is missing or truncated and, without `trust`, for one that
    the manifest next to it does not list, or lists with other content.
    """
    if not path.is_file():
        raise EngineError(
            f"{path}: there is no such engine", hint="`moexport build BUNDLE` builds one"
        )
    record, listed = _listed(path)
    header_backend, version, expected_bytes = _header(path) or (None, None, None)
    size = path.stat().st_size
    if expected_bytes is None:
        expected_bytes = size if listed is None else listed.bytes
    if size < expected_bytes:
        raise EngineError(
            f"{path} is truncated: {size} of {expected_bytes} bytes",
            hint="copy it again from an intact file, or build it again with `moexport build`",
        )
    if record is None and not trust:
        raise EngineError(f"{path}: no manifest next to it lists this engine", hint=TRUST)
    if listed is not None and not trust and known_sha256(path) != listed.sha256:
        raise EngineError(
            f"{path} is not the engine in {MANIFEST_FILE} (SHA-256 differs): it is "
            "damaged or was replaced",
            hint=f"build it again with `moexport build`; {TRUST}",
        )
    own = record is not None and listed is not None and is_own(record.signature, listed.sha256)
    expected_sha256 = listed.sha256 if listed is not None and not trust else None
    return PlanFile(
        path=path,
        record=record,
        backend=_backend(path, record, header_backend),
        trusted=trust or own,
        sha256=expected_sha256,
        version=version,
    )


def _backend(path: Path, record: EngineRecord | None, header_backend: Backend | None) -> Backend:
    if record is not None:
        listed = backend_named(record.flavour)
        if header_backend is not None and header_backend != listed:
            raise EngineError(
                f"{path} is an engine of {header_backend.title}, but {MANIFEST_FILE} lists one of "
                f"{listed.title}",
                hint=f"build it again with `moexport build {path.parent} --target {listed.name}`",
            )
        return listed
    if header_backend is not None:
        return header_backend
    named = [backend for name, backend in BACKENDS.items() if name in path.name]
    if not named:
        raise EngineError(
            f"{path} does not begin like a plan of {TENSORRT_RTX.title}, and nothing else "
            "identifies its backend",
            hint="rename it to engine-tensorrt.plan if it is TensorRT's",
        )
    return max(named, key=lambda backend: len(backend.name))


def _listed(path: Path) -> tuple[EngineRecord | None, FileRecord | None]:
    if not (path.parent / MANIFEST_FILE).is_file():
        return None, None
    manifest = Manifest.read(path.parent)
    record = next((engine for engine in engines_of(manifest) if engine.file == path.name), None)
    return record, manifest.files.get(path.name)


def trusted_content(plan: PlanFile) -> bytes:
    """Returns the content of an engine that may run; exactly these bytes have the listed hash."""
    if not plan.trusted:
        raise UntrustedEngineError(
            f"{plan.path} was not built by you on this machine, and an engine is code",
            hint=f"build it here: `moexport build {plan.path.parent}`; or, if you trust whoever "
            "made the bundle, load it with --trust-engine",
        )
    content = plan.path.read_bytes()
    if plan.sha256 is not None and hashlib.sha256(content).hexdigest() != plan.sha256:
        raise EngineError(f"{plan.path} was replaced while it was being loaded")
    return content


def check_private(folder: Path) -> None:
    """Raises `EngineError` for a folder where others can put engines, which are code."""
    why = why_not_private(folder)
    if why is not None:
        raise EngineError(
            f"engine cache {folder}: {why}, but an engine is code",
            hint=f"chmod go-w {folder}, or name another folder with --engine-cache",
        )


def own_signature(text: str) -> str:
    """Returns a keyed hash that only this user can make; empty if no key can be kept.

    The hash identifies files that moexport has written for this user on this machine. The key is in
    the user's cache folder, and nobody else can read it.
    """
    key = _own_key()
    return "" if key is None else hmac.new(key, text.encode(), "sha256").hexdigest()


def is_own(signature: str, text: str) -> bool:
    """Whether `own_signature` made this signature from the text."""
    return bool(signature) and hmac.compare_digest(signature, own_signature(text))


KEY_BYTES = 32


def _own_key() -> bytes | None:
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / "key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why_not_private(folder) is not None:
            return None
        with locked(folder):
            if not path.exists():
                with whole_file(path) as partial:
                    partial.chmod(0o600)
                    partial.write_bytes(os.urandom(KEY_BYTES))
            key = path.read_bytes()
            private = sys.platform == "win32" or not path.stat().st_mode & 0o077
    except (OSError, OutputError):  # without a key, nothing counts as this user's own
        return None
    return key if private and len(key) == KEY_BYTES else None
