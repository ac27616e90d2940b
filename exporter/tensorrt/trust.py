"""Whose an engine is: one is loaded only when its user built it here, or says to trust it.

A plan is code: TensorRT runs what is in it. So it must be the file that the bundle's manifest
names, byte for byte, with a signature that this user alone can make; and no folder of cached
engines is used that others may write to.
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

TRUST = "--trust-engine loads it all the same: do that only for a file of your own"

MAGIC = {b"vtrt": TENSORRT_RTX}
"""First bytes of a plan as TensorRT-RTX 1.7.1 writes them; others are known by their record."""

SIZE_AT, VERSION_AT, HEADER_BYTES = 16, 24, 64
"""Where that header keeps the file's size (8 bytes, little-endian) and version (4 bytes)."""


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What the first bytes of a plan tell: who wrote it and how large it should be."""

    backend: Backend
    version: str
    size: int


def read_header(path: Path) -> PlanHeader | None:
    """Returns the header of a plan, or None where the file does not begin as one that is known."""
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    backend = MAGIC.get(start[:4])
    if backend is None or len(start) < HEADER_BYTES:
        return None
    size = int.from_bytes(start[SIZE_AT : SIZE_AT + 8], "little")
    version = ".".join(str(number) for number in start[VERSION_AT : VERSION_AT + 4])
    return PlanHeader(backend=backend, version=version, size=size)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan file, its record where a manifest lists it, and its SHA-256 where that must hold.

    `trusted` says that this user built it here, or that the user trusts it.
    """

    path: Path
    record: EngineRecord | None
    backend: Backend
    trusted: bool = False
    sha256: str | None = None


def find_plan(path: Path, *, trust: bool = False) -> PlanFile:
    """Returns a plan that may be loaded.

    Raises `EngineError` for one that is missing, truncated, not the file that the manifest beside
    it names, or in no manifest at all; the last two are let through with `trust`.
    """
    if not path.is_file():
        raise EngineError(
            f"{path}: there is no such engine", hint="`moexport build BUNDLE` makes one"
        )
    record, known = _listed(path)
    header = read_header(path)
    size = path.stat().st_size
    whole = header.size if header is not None else known.bytes if known is not None else size
    if size < whole:
        raise EngineError(
            f"{path}: truncated: {size} of {whole} bytes",
            hint="copy it again from an intact copy, or build it again with `moexport build`",
        )
    if record is None and not trust:
        raise EngineError(f"{path}: no manifest beside it lists this engine", hint=TRUST)
    if known is not None and not trust and known_sha256(path) != known.sha256:
        raise EngineError(
            f"{path}: is not the engine that {MANIFEST_FILE} names (SHA-256 differs): it is "
            "damaged or was replaced",
            hint=f"build it again with `moexport build`; {TRUST}",
        )
    own = record is not None and known is not None and is_own(record.signature, known.sha256)
    must_be = known.sha256 if known is not None and not trust else None
    return PlanFile(
        path=path,
        record=record,
        backend=_backend(path, record, header),
        trusted=trust or own,
        sha256=must_be,
    )


def _backend(path: Path, record: EngineRecord | None, header: PlanHeader | None) -> Backend:
    if record is not None:
        listed = backend_named(record.flavour)
        if header is not None and header.backend != listed:
            raise EngineError(
                f"{path}: is an engine of {header.backend.title}, and {MANIFEST_FILE} lists one of "
                f"{listed.title}",
                hint=f"build it again with `moexport build {path.parent} --target {listed.name}`",
            )
        return listed
    if header is not None:
        return header.backend
    named = [backend for name, backend in BACKENDS.items() if name in path.name]
    if not named:
        raise EngineError(
            f"{path}: does not begin as a plan of {TENSORRT_RTX.title} does, and nothing says "
            "whose it is",
            hint="call it engine-tensorrt.plan if it is TensorRT's",
        )
    return max(named, key=lambda backend: len(backend.name))


def _listed(path: Path) -> tuple[EngineRecord | None, FileRecord | None]:
    """The record and hash of an engine in the manifest beside it."""
    if not (path.parent / MANIFEST_FILE).is_file():
        return None, None
    manifest = Manifest.read(path.parent)
    record = next((engine for engine in engines_of(manifest) if engine.file == path.name), None)
    return record, manifest.files.get(path.name)


def trusted_content(plan: PlanFile) -> bytes:
    """Returns the bytes of an engine whose code may run; what was hashed is what is loaded."""
    if not plan.trusted:
        raise UntrustedEngineError(
            f"{plan.path}: was not built by you on this machine, and an engine is code",
            hint=f"build it here: `moexport build {plan.path.parent}`; or, where you know who made "
            "the bundle, load it with --trust-engine",
        )
    content = plan.path.read_bytes()
    if plan.sha256 is not None and hashlib.sha256(content).hexdigest() != plan.sha256:
        raise EngineError(f"{plan.path}: was exchanged while it was being loaded")
    return content


def check_private(folder: Path) -> None:
    """Raises `EngineError` for a folder in which others may put engines: those are code."""
    why = why_not_private(folder)
    if why is not None:
        raise EngineError(
            f"engine cache {folder}: {why}, and an engine is code",
            hint=f"chmod go-w {folder}, or name another folder with --engine-cache",
        )


def own_signature(text: str) -> str:
    """Returns a keyed hash that this user alone can make; empty where no key can be kept.

    It tells what this user's runs of moexport wrote on this machine from what came from elsewhere.
    The key lies in the user's cache folder, readable to nobody else.
    """
    key = _own_key()
    return "" if key is None else hmac.new(key, text.encode(), "sha256").hexdigest()


def is_own(signature: str, text: str) -> bool:
    """Whether `own_signature` made a signature of this text."""
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
    except (OSError, OutputError):  # no key: nothing counts as this user's own
        return None
    return key if private and len(key) == KEY_BYTES else None
