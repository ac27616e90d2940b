"""A bundle on disk: opening, running and verifying it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from ...calibration.feeds import batches
from ...common.files import sha256
from ...common.writing import check_file, whole_file
from ...errors import BundleError, EngineError, FeedError, MoexportError, UsageError
from ..axes import TRACED_BATCH
from ..inputs import with_axes
from ..parity import PARITY_FILE, Parity, Reference, Tolerance, compare, describe, recorded
from ..session import PROVIDERS, Runner, Session, SessionOptions, check_array
from ..tensorrt.plan_file import TRUST
from .manifest import MANIFEST_FILE, Check, GraphRecord, Manifest, PortRecord, is_as_written

if TYPE_CHECKING:
    from ...graphs.lower import LayerValues
    from ..tensorrt.records import EngineRecord
    from ..tensorrt.session import EngineSession


AS_RECORDED = "SHA-256 as recorded"

CHANGED = "the content has changed"

LARGE_WEIGHTS_BYTES = 1 << 30
"""Beyond this a check runs without pre-packed weights: slower, at half the memory."""


@dataclass(frozen=True)
class Bundle:
    """An exported model: a folder with a manifest, ONNX graphs and their weights."""

    path: Path
    manifest: Manifest

    @staticmethod
    def open(path: Path | str) -> Bundle:
        """Opens a bundle; `BundleError` when the folder is none."""
        directory = Path(path)
        return Bundle(directory, Manifest.read(directory))

    def graph(self, name: str | None = None) -> GraphRecord:
        """Returns the graph of a file or lowering, the main one by default.

        Raises `UsageError` that lists what there is.
        """
        for record in self.manifest.graphs:
            if name in (None, record.file, *record.lowerings.values()):
                return record
        known = ", ".join(record.file for record in self.manifest.graphs)
        raise UsageError(f"{self.path}: holds no graph '{name}'", hint=f"it holds {known}")

    def session(self, graph: str | None = None, options: SessionOptions | None = None) -> Session:
        """Returns a graph of the bundle, ready to run in ONNX Runtime."""
        path = self.path / self.graph(graph).file
        if not path.is_file():
            raise BundleError(f"{path}: the file is missing", hint="export the bundle again")
        return Session(path, options)

    def engine(
        self, backend: str, graph: str | None = None, *, trust: bool = False, eager: bool = False
    ) -> EngineSession:
        """Returns an engine of the bundle, ready to run on the GPU; `eager` as in `EngineSession`.

        Raises what `engine_record` and loading it raise.
        """
        from ..tensorrt.session import EngineSession

        record = self.engine_record(backend, graph)
        return EngineSession(self.path / record.file, trust=trust, eager=eager)

    def engine_record(self, backend: str, graph: str | None = None) -> EngineRecord:
        """Returns what the manifest says of an engine; nothing is loaded.

        Raises `EngineError` where the bundle has none of that backend for the graph.
        """
        from ..tensorrt.records import engines_of

        wanted = self.graph(graph).file
        for record in engines_of(self.manifest):
            if record.flavour == backend and record.graph == wanted:
                return record
        raise EngineError(
            f"{self.path}: holds no {backend} engine of {wanted}",
            hint=f"`moexport build {self.path} --target {backend}` makes one",
        )

    def verify(self) -> Iterator[Check]:
        """Yields the checks: every file's hash, every graph's validity, every graph's parity."""
        same = is_as_written(self.path)
        yield Check(f"hash of {MANIFEST_FILE}", same, AS_RECORDED if same else CHANGED)
        damaged = False
        for name, record in self.manifest.files.items():
            check = _hash_check(self.path / name, record.sha256, record.bytes)
            damaged |= not check.passed
            yield check
        if damaged:
            return  # graphs over damaged files would fail with less clear words
        from ..tensorrt.check import engine_checks

        valid = []
        for graph in self.manifest.graphs:
            check = _onnx_check(self.path / graph.file)
            yield check
            if check.passed:
                valid.append(graph)
        if PARITY_FILE not in self.manifest.files:
            yield from engine_checks(self.path, self.manifest, None)
            yield Check("parity", False, "the bundle was exported with --no-verify: no reference")
            return
        expected = Reference.load(self.path / PARITY_FILE)
        for graph in valid:
            yield self._parity_check(graph, expected)
        yield from engine_checks(self.path, self.manifest, expected)

    def _parity_check(self, graph: GraphRecord, expected: Reference) -> Check:
        name = f"parity of {graph.file}"
        try:
            parity = graph_parity(
                self.path,
                graph,
                expected,
                fixed_batch=self.fixed_batch,
                k_input=self.manifest.k == "input",
                tolerance=recorded(self.manifest.parity),
            )
        except MoexportError as error:
            return Check(name, False, error.message)
        return Check(name, parity.passed, describe(parity))

    @property
    def fixed_batch(self) -> int | None:
        """The batch size where it is a constant of the graph."""
        size = self.manifest.inputs[0].shape[0]
        return size if isinstance(size, int) else None


def graph_parity(
    directory: Path,
    graph: GraphRecord,
    expected: Reference,
    *,
    fixed_batch: int | None,
    k_input: bool,
    tolerance: Tolerance,
) -> Parity:
    """Runs a graph of a bundle, or of one being written, against its reference."""
    return compare(
        checking_session(directory, graph, observe=expected.observed(graph.selected)),
        expected,
        graph.selected,
        batch=fixed_batch or TRACED_BATCH + 1,
        tolerance=tolerance,
        k=next(iter(expected.kept.values())) if k_input else None,
    )


def checking_session(
    directory: Path, graph: GraphRecord, *, observe: Mapping[str, int] | None = None
) -> Session:
    """Returns a graph of a bundle, or of one being written, ready for its values to be compared."""
    weights = sum(file.stat().st_size for file in directory.glob("*.bin"))
    prepack = weights < LARGE_WEIGHTS_BYTES
    return Session(
        directory / graph.file,
        SessionOptions(prepack=prepack, plan_memory=False, observe=observe, rounded=True),
    )


def selected_values(values: Mapping[str, LayerValues]) -> dict[str, str]:
    """Returns the names of the values that hold what was chosen, of the layers that choose."""
    return {key: name for layer in values.values() for key, name in layer.choices.items()}


def _hash_check(path: Path, expected: str, size: int) -> Check:
    name = f"hash of {path.name}"
    if not path.is_file():
        return Check(name, False, "the file is missing")
    trust = f"; `moexport run` with {TRUST}" if path.suffix == ".plan" else ""
    if path.stat().st_size != size:
        return Check(name, False, f"{path.stat().st_size} bytes, not {size}{trust}")
    same = sha256(path) == expected
    return Check(name, same, AS_RECORDED if same else f"{CHANGED}{trust}")


def _onnx_check(path: Path) -> Check:
    name = f"ONNX check of {path.name}"
    try:
        onnx.checker.check_model(str(path))
        nodes = len(onnx.load(path, load_external_data=False).graph.node)
    except (onnx.checker.ValidationError, DecodeError) as error:
        detail = str(error).strip().splitlines()[0]
        if "symbolic link" in detail:
            detail += " Copy the bundle with links followed: cp -rL"
        return Check(name, False, detail)
    return Check(name, True, f"valid, {nodes} nodes")


ONNXRUNTIME = "onnxruntime"


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a run wrote: the output's shape, and how many of its values are NaN or infinite."""

    shape: tuple[int, ...]
    not_finite: int


def run_file(
    bundle_path: Path,
    input_file: Path,
    output_file: Path,
    *,
    k: int | None = None,
    graph: str | None = None,
    threads: int | None = None,
    engine: str = ONNXRUNTIME,
    provider: str = "cpu",
    trust_engine: bool = False,
) -> Outputs:
    """Writes a bundle's output for the inputs of an `.npz` to another one; tells what it wrote.

    `engine` is who runs it: `onnxruntime` on a `provider`, or an engine that was built.
    Raises `UsageError` for a k outside 1 … n and an output file of another kind or that is the
    input, `FeedError` for inputs that do not fit; and what an engine's profiles do not contain
    before it is loaded.
    """
    check_file(output_file)
    if output_file.suffix != ".npz":
        raise UsageError(
            f"--output {output_file}: outputs are written as an .npz archive",
            hint=f"for example -o {output_file.stem.lstrip('-') or 'y'}.npz",
        )
    if output_file.exists() and input_file.exists() and output_file.samefile(input_file):
        raise UsageError(
            f"--output {output_file}: that is the input, which would be lost",
            hint="choose another -o",
        )
    bundle = Bundle.open(bundle_path)
    record = bundle.manifest
    fewest = min(layer.experts for layer in record.layers)
    if k is not None and not 1 <= k <= fewest:
        raise UsageError(f"--k {k}: the model has {fewest} experts", hint=f"use 1 ≤ k ≤ {fewest}")
    port = record.inputs[0]
    x = _fitted(_inputs(input_file, port.name), port)
    session: Runner
    if engine == ONNXRUNTIME:
        chosen = SessionOptions(PROVIDERS[provider], threads=threads)
        session = bundle.session(graph, chosen)
    else:
        # What cannot run is refused before anything is loaded, on a machine without a GPU too.
        found = bundle.engine_record(engine, graph)
        check_array(x, port.name, port.dtype, port.shape)
        found.check_fits(x.shape, k)
        session = bundle.engine(engine, graph, trust=trust_engine)
    y = session(x, k)
    _write(output_file, record.outputs[0].name, y)
    return Outputs(y.shape, int(y.size - np.isfinite(y).sum()))


def _inputs(path: Path, name: str) -> np.ndarray:
    """All inputs of a feed; they must stack, since none may be left out."""
    parts = list(batches(path, name))
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) != 1:
        found = ", ".join(map(str, shapes)) or "no shape"
        raise FeedError(
            f"{path}: its arrays do not stack: inputs of {found}",
            hint="run each size of inputs by itself",
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _fitted(x: np.ndarray, port: PortRecord) -> np.ndarray:
    """The inputs with the axis that may be left out; FeedError where they go too far."""
    x = with_axes(x, port)
    if x.ndim == len(port.shape):
        for axis, most in port.limits.items():
            size = x.shape[port.shape.index(axis)] if axis in port.shape else 0
            if size > most:
                raise FeedError(
                    f"input '{port.name}': {size} {axis}, but the model takes at most {most}",
                    hint=f"cut the inputs to {most} {axis}",
                )
    if port.below is not None and x.dtype.kind in "iu" and x.size:
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= port.below:
            raise FeedError(
                f"input '{port.name}' holds {low if low < 0 else high}, but the model takes values "
                f"from 0 to {port.below - 1}",
                hint="token ids are those of the tokenizer that the model was trained with",
            )
    return x


def _write(path: Path, name: str, y: np.ndarray) -> None:
    with whole_file(path) as partial, partial.open("wb") as file:
        np.savez(file, **{name: y})  # type: ignore[arg-type]  # names come as keywords
