"""A plan file before it is loaded: whether it is whole, known and meant for this machine.

A plan is code: TensorRT runs what is in it. So one is loaded only when it is the file that the
bundle's manifest names, byte for byte, or when the user says that it is trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...common.hashing import sha256
from ...errors import EngineError, ForeignEngineError
from ..bundle.manifest import MANIFEST_FILE, FileRecord, Manifest
from .backends import FLAVOURS, TENSORRT_RTX, Flavour, flavour
from .device import Gpu, first_gpu
from .record import EngineRecord
from .records import engines_of

TRUST = "--trust-engine loads it all the same: do that only for a file of your own"

MAGIC = {b"vtrt": TENSORRT_RTX}
"""First bytes of a plan as TensorRT-RTX 1.7.1 writes them; others are told by their record."""

SIZE_AT, VERSION_AT, HEADER_BYTES = 16, 24, 64
"""Where that header keeps the file's size (8 bytes, little-endian) and version (4 bytes)."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes of a plan tell: who wrote it and how large it should be."""

    flavour: Flavour
    version: str
    size: int


def read_header(path: Path) -> Header | None:
    """Returns the header of a plan, or None where the file does not begin as one that is known."""
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    found = MAGIC.get(start[:4])
    if found is None or len(start) < HEADER_BYTES:
        return None
    size = int.from_bytes(start[SIZE_AT : SIZE_AT + 8], "little")
    version = ".".join(str(each) for each in start[VERSION_AT : VERSION_AT + 4])
    return Header(found, version, size)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan file, and its record where a manifest lists it."""

    path: Path
    record: EngineRecord | None
    flavour: Flavour


def find_plan(path: Path, *, trust: bool = False) -> Plan:
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
            hint="copy it again from where it is whole, or build it again with `moexport build`",
        )
    if record is None and not trust:
        raise EngineError(f"{path}: no manifest beside it lists this engine", hint=TRUST)
    if known is not None and not trust and sha256(path) != known.sha256:
        raise EngineError(
            f"{path}: is not the engine that {MANIFEST_FILE} names (SHA-256 differs): it is "
            "damaged or was replaced",
            hint=f"build it again with `moexport build`; {TRUST}",
        )
    return Plan(path, record, _flavour(path, record, header))


def _flavour(path: Path, record: EngineRecord | None, header: Header | None) -> Flavour:
    if record is not None:
        listed = flavour(record.flavour)
        if header is not None and header.flavour != listed:
            raise EngineError(
                f"{path}: is an engine of {header.flavour.title}, and {MANIFEST_FILE} lists one of "
                f"{listed.title}",
                hint=f"build it again with `moexport build {path.parent} --target {listed.name}`",
            )
        return listed
    if header is not None:
        return header.flavour
    named = [each for name, each in FLAVOURS.items() if name in path.name]
    if not named:
        raise EngineError(
            f"{path}: does not begin as a plan of {TENSORRT_RTX.title} does, and nothing says "
            "whose it is",
            hint="call it engine-tensorrt.plan if it is TensorRT's",
        )
    return max(named, key=lambda each: len(each.name))


def _listed(path: Path) -> tuple[EngineRecord | None, FileRecord | None]:
    """The record and hash of an engine in the manifest beside it."""
    if not (path.parent / MANIFEST_FILE).is_file():
        return None, None
    manifest = Manifest.read(path.parent)
    record = next((each for each in engines_of(manifest) if each.file == path.name), None)
    return record, manifest.files.get(path.name)


def check_runs_here(plan: Plan) -> None:
    """Raises `ForeignEngineError` for an engine of another version or GPU, before it is loaded.

    Such an engine is sound, and the message says where it runs.
    """
    gpu = first_gpu()
    if gpu is not None:
        plan.flavour.check_serves(gpu)
    # The module's own word: a package's version can differ from it (8.6.1.post1 holds 8.6.1).
    installed = str(plan.flavour.load().__version__)
    record = plan.record
    if record is None:
        return
    if record.version != installed and not record.options.get("version_compatible"):
        raise ForeignEngineError(
            f"{plan.path}: built by {plan.flavour.title} {record.version}, and {installed} is "
            "installed; an engine runs in the version that built it",
            hint=f"build it again here with `moexport build {plan.path.parent}`, or install "
            f"{record.version}",
        )
    if gpu is not None:
        _check_gpu(plan, record, gpu)


def _check_gpu(plan: Plan, record: EngineRecord, gpu: Gpu) -> None:
    """Raises `ForeignEngineError` for an engine that was built for other compute capabilities.

    TensorRT's are for the GPU that they were built on, TensorRT-RTX's for all that were named.
    """
    if record.options.get("hardware_compatible"):
        return
    if gpu.compute_capability not in record.compute_capabilities:
        option = "--compute-capability" if plan.flavour.cards else "--hardware-compatible"
        raise ForeignEngineError(
            f"{plan.path}: built for {record.device or 'cards'} of compute capability "
            f"{', '.join(record.compute_capabilities)}, and this machine has {gpu.name} "
            f"({gpu.compute_capability})",
            hint=f"build it again here with `moexport build {plan.path.parent}`; {option} builds "
            "one for several",
        )
