"""Puts built engines into a bundle: their files, and what its manifest says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.documents import from_data
from ...common.writing import locked, temporary_folder, to_disk, write_text
from ...errors import BundleError
from ..bundle.manifest import MANIFEST_FILE, FileRecord, Manifest, is_plain_name
from .profiles import Profile, check_k, choose


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine of a bundle.

    `precision` counts the matrix products and convolutions by the type they compute in, as read
    back from what was compiled; the file `layers` lists them. `device` is the GPU of an engine that
    is for that GPU alone. `key` stands for graph, weights, options, version and device: engines
    with the same key are the same. `peak_memory_bytes` is what the build took of the machine's
    memory. `kernels` has, by MoE layer, the types that the engine's own layers of its experts read
    and write, where there was a GPU to inspect it on; `bound` the weights that are its inputs. By
    `signature` the user who built it, on that machine, knows it as their own.
    """

    file: str
    graph: str
    flavour: str
    version: str
    compute_capabilities: list[str]
    device: str | None
    precision: dict[str, int]
    profiles: list[dict[str, Any]]
    options: dict[str, Any]
    settings: dict[str, Any]
    layers: str
    key: str
    seconds: float
    peak_memory_bytes: int
    signature: str = ""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    bound: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The record as it stands in a manifest."""
        return asdict(self)

    def check_fits(self, shape: Sequence[int], k: int | None) -> None:
        """Raises, without the engine, what a run of inputs of this shape with this k would raise.

        That is `FeedError` for a shape and `UsageError` for a k that no profile contains.
        """
        check_k(self.ranges, k)
        choose(self.ranges, shape, k)

    @property
    def ranges(self) -> list[Profile]:
        """The profiles, to be asked what they contain."""
        return [Profile.from_json(profile) for profile in self.profiles]


@dataclass(frozen=True, slots=True)
class Made:
    """A built engine, or one that was there before (`reused`: `bundle`, `cache` or None)."""

    record: EngineRecord
    files: Mapping[str, FileRecord]
    reused: str | None


def engines_of(manifest: Manifest) -> list[EngineRecord]:
    """Returns the engines that a manifest lists; `BundleError` where one is not complete."""
    what = f"{MANIFEST_FILE}: not a complete manifest"
    records = [
        from_data(EngineRecord, entry, what, at=f"engines[{index}]", error=BundleError)
        for index, entry in enumerate(manifest.engines)
    ]
    for record in records:
        try:
            plain = (
                all(map(is_plain_name, (record.file, record.graph, record.layers)))
                and record.ranges
            )
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise BundleError(f"{what}: the profiles of {record.file}: {error}") from error
        if not plain:
            raise BundleError(f"{what}: {record.file!r} is no engine in the bundle's folder")
    return records


def with_engines(manifest: Manifest, made: Sequence[Made]) -> Manifest:
    """Returns the manifest with these engines in place of those of the same files."""
    new = {engine.record.file: engine.record for engine in made}
    old = [record for record in engines_of(manifest) if record.file not in new]
    files = dict(manifest.files)
    for engine in made:
        files.update(engine.files)
    engines: list[dict[str, Any]] = [record.as_json() for record in (*old, *new.values())]
    return replace(manifest, engines=engines, files=dict(sorted(files.items())))


def without_files(manifest: Manifest, names: set[str]) -> Manifest:
    """Returns the manifest without the engines of these files."""
    return replace(
        manifest,
        engines=[engine for engine in manifest.engines if engine.get("file") not in names],
        files={name: record for name, record in manifest.files.items() if name not in names},
    )


def add_to_bundle(directory: Path, made: Sequence[Made], staged: Path) -> None:
    """Moves built engines into a bundle and lists them in its manifest.

    The bundle is whole at every moment: an engine that is replaced is first struck from the
    manifest, and the new one is listed when its files are there. Two builds take turns, and each
    keeps what the other added.
    """
    names = sorted({name for engine in made for name in engine.files})
    with _write_errors(directory), locked(directory):
        if names:
            for name in names:
                to_disk(staged / name)
            _write_manifest(directory, without_files(Manifest.read(directory), set(names)))
            for name in names:
                (staged / name).replace(directory / name)
        manifest = with_engines(
            Manifest.read(directory), [engine for engine in made if engine.files]
        )
        _write_manifest(directory, manifest)


@contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """Yields a temporary folder inside a bundle, which goes when the block ends."""
    with ExitStack() as stack:
        with _write_errors(directory):
            folder = stack.enter_context(temporary_folder(directory / "engines"))
        yield folder


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """What the system refuses to write is a `BundleError`."""
    try:
        yield
    except OSError as error:
        raise BundleError(
            f"{directory}: cannot be written: {error.strerror}",
            hint="free some space, or copy the bundle to a folder that you may write to",
        ) from error


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    write_text(manifest.to_json(), directory / MANIFEST_FILE)
