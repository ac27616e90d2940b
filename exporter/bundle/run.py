"""Runs a bundle on a file of inputs, batch by batch, into a file of outputs."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...common.console import Silent
from ...common.locations import local
from ...common.option import takes
from ...common.writing import check_file, whole_file
from ...data.arrays import npz_array, npz_names
from ...data.batches import INPUT, rebatched
from ...data.feeds import batches, count
from ...errors import FeedError, OutputError, UsageError
from ...graphs.names import PRESENT, is_score
from ...graphs.sizes import AxisRange
from ..inputs import check_array, with_axes
from ..requests import AnyPath, RunRequest
from ..session import GraphSession
from .bundle import Bundle
from .manifest import Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class Outputs:
    """The result of a run: the first output's shape, and the number of NaN or infinite values.

    `further` are the shapes of the other outputs, by name.
    """

    shape: tuple[int, ...]
    not_finite: int
    further: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@takes(RunRequest)
def run(
    bundle: Bundle | AnyPath, inputs: AnyPath, outputs: AnyPath, options: RunRequest
) -> Outputs:
    """Writes a bundle's outputs for the inputs of a file; for arrays use `Bundle.session`.

    `inputs` is an `.npz` with the model's inputs [b, ...], `outputs` the one to write. The first
    input is read, and the first output written, batch by batch; the others are held in memory.

    Raises:
        UsageError: k is outside 1 … n, a batch size outside the bundle's range, or the output file
            has another suffix or is the input.
        OutputError: the output file exists, without `force`.
        FeedError: the inputs do not fit the model.
    """
    bundle_path, input_file, output_file = Bundle.folder(bundle), local(inputs), Path(outputs)
    k, progress = options.k, options.progress or Silent()
    _check_output(output_file, input_file, force=options.force)
    opened = Bundle.open(bundle_path, check=options.check)
    record = opened.manifest
    fewest = min(record.experts.values())
    if k is not None and not 1 <= k <= fewest:
        raise UsageError(f"--k {k}: the model has {fewest} experts", hint=f"use 1 ≤ k ≤ {fewest}")
    spec = record.inputs[0]
    total = count(str(input_file), spec.name)
    _check_groups(options.batch_size, total, record.group_size, input_file)
    feed = in_batches(_checked_parts(input_file, spec), _sizes(record, options, total))
    first = next(feed, None)
    if first is None:
        raise FeedError(f"{input_file} contains no inputs")
    others = _others(input_file, record.inputs[1:], total)
    session = _session(opened, options, first, k)
    progress.step(f"running {bundle_path.name}", total=total, unit="inputs")
    names = _written_outputs(record)
    with whole_file(output_file) as partial, _OutputArchive(partial, names[0], total) as rows:
        done = 0
        for x in chain([first], feed):
            extra = {name: array[done : done + len(x)] for name, array in others.items()}
            rows.add(session.run({spec.name: x, **extra} if extra else x, k, names))
            progress.advance(len(x))
            done += len(x)
        if total is not None and done != total:
            raise FeedError(f"{input_file} changed while it was read")
    return Outputs(rows.shapes.pop(names[0]), rows.not_finite, rows.shapes)


def _written_outputs(record: Manifest) -> list[str]:
    """Returns the names of the outputs to write: all but the cache.

    Routing is written only if the graph has scores, or coefficients of a layer that keeps all
    experts.
    """
    layers = {layer.name: layer.k == layer.experts for layer in record.layers}
    names = [spec.name for spec in record.outputs]
    chosen = {name for graph in record.graphs for name in graph.selected.values()}
    scores = any(
        layers.get(n.rpartition("/")[0], False) if n in chosen else is_score(n, layers)
        for n in names
    )
    left_out = set() if scores else chosen
    return [n for n in names if n not in left_out and not n.startswith(f"{PRESENT}.")]


def _check_output(output: Path, source: Path, *, force: bool) -> None:
    check_file(output)
    if output.suffix != ".npz":
        raise UsageError(
            f"--output {output}: outputs are written as an .npz archive",
            hint=f"for example -o {output.stem.lstrip('-') or 'y'}.npz",
        )
    if output.exists() and source.exists() and output.samefile(source):
        raise UsageError(
            f"--output {output} is the input, which would be lost", hint="choose another -o"
        )
    if output.exists() and not force:
        raise OutputError(f"{output}: the file already exists", hint="--force replaces it")


def _session(bundle: Bundle, options: RunRequest, x: np.ndarray, k: int | None) -> GraphSession:
    if options.runs_graph:
        return bundle.session(
            options.graph,
            runtime=options.engine,
            threads=options.threads,
            **options.session_options,
        )
    assert options.engine is not None
    # Impossible runs are refused before anything is loaded, even on a machine without a GPU.
    spec = bundle.manifest.inputs[0]
    record = bundle.engine_record(options.engine, options.graph)
    check_array(x, spec)
    record.check_fits(x.shape, k)
    return bundle.engine(
        options.engine, options.graph, trust=options.trust_engine, host_weights=options.host_weights
    )


def _check_groups(size: int | None, total: int | None, group: int, source: Path) -> None:
    """Raises if a group of inputs that are computed together would be incomplete."""
    reason = f"the bundle computes {group} inputs together"
    if size is not None and size % group:
        raise UsageError(f"--batch-size {size}: {reason}", hint=f"choose a multiple of {group}")
    if total is not None and total % group:
        raise FeedError(
            f"{source} contains {total} inputs, but {reason}",
            hint=f"give a multiple of {group} inputs: padding would change other outputs",
        )


def _sizes(record: Manifest, options: RunRequest, total: int | None) -> AxisRange:
    """Returns the batch sizes: smallest, usual and largest."""
    known, size = record.batches, options.batch_size
    if not options.runs_graph:  # an engine's profiles limit the batch
        usual = size or total or known.max
        return AxisRange(1, usual, usual)
    if size is not None and not known.min <= size <= known.max:
        raise UsageError(
            f"--batch-size {size}: the bundle was exported for batches of {known}",
            hint=f"choose {known.min} to {known.max}, or export with another --batch",
        )
    return AxisRange(known.min, size or known.max, known.max)


def _others(path: Path, specs: Sequence[TensorSpec], total: int | None) -> dict[str, np.ndarray]:
    """Returns all inputs in a file except the first; missing ones get their defaults later."""
    if path.suffix != ".npz":
        return {}
    names = set(npz_names(path))
    arrays = {spec.name: npz_array(path, spec.name) for spec in specs if spec.name in names}
    for spec in specs:
        if spec.default == "zeros" and spec.name in arrays and arrays[spec.name].ndim == 1:
            strengths = arrays[spec.name]  # the same strengths for all inputs
            arrays[spec.name] = np.broadcast_to(strengths, (total or 1, len(strengths)))
    for name, array in arrays.items():
        if total is not None and len(array) != total:
            raise FeedError(
                f"{path}: '{name}' has {len(array)} inputs, but the first input has {total}",
                hint="each array needs one row per input",
            )
    return arrays


def _checked_parts(path: Path, spec: TensorSpec) -> Iterator[np.ndarray]:
    """Yields the inputs of a feed, a few at a time; they must stack, since none may be left out."""
    shape: tuple[int, ...] | None = None
    for part in batches(path, spec.name):
        shape = part.shape[1:] if shape is None else shape
        if part.shape[1:] != shape:
            shapes = ", ".join(map(str, sorted({part.shape[1:], shape})))
            raise FeedError(
                f"{path}: the arrays do not stack; their inputs have the shapes {shapes}",
                hint="run inputs of each size separately",
            )
        x = with_axes(part, spec)
        # The length is not checked: these parts are divided into batches.
        check_array(x, replace(spec, shape=("batch", *spec.shape[1:])))
        yield x


def in_batches(parts: Iterator[np.ndarray], sizes: AxisRange) -> Iterator[np.ndarray]:
    """Yields inputs in batches of the usual size; the last ones are balanced: none is too small.

    Raises `FeedError` if the inputs cannot be divided into batches of these sizes.
    """
    first = next(parts, None)
    if first is None:
        return
    tail = first[:0]
    fields = ({INPUT: part} for part in chain([first], parts))
    for batch in (part[INPUT] for part in rebatched(fields, sizes.opt)):
        if len(tail) and len(batch) < sizes.min:
            tail = np.concatenate((tail, batch))
            continue
        if len(tail):
            yield tail
        tail = batch
    # the caller checks the batch
    if not len(tail) or sizes.fixed or sizes.min <= len(tail) <= sizes.opt:
        yield tail
    elif len(tail) >= 2 * sizes.min:
        yield tail[: -sizes.min]
        yield tail[-sizes.min :]
    elif sizes.min <= len(tail) <= sizes.max:
        yield tail
    else:
        raise FeedError(
            f"{len(tail)} input{' is' if len(tail) == 1 else 's are'} left, but the bundle was "
            f"exported for batches of {sizes.min} to {sizes.max}",
            hint="give a number of inputs that can be divided into such batches, or export again "
            "with --batch 1:8:32",
        )


class _OutputArchive:
    """An `.npz` archive of arrays that grow by rows; a context manager that completes it.

    If the number of rows is known, those of the array `name` are written as they arrive. Other
    arrays are kept until the end, since an archive stores one array after the other.
    """

    def __init__(self, path: Path, name: str, total: int | None) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.not_finite = 0
        self._name, self._total = name, total
        self._parts: dict[str, list[np.ndarray]] = {}
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _OutputArchive:
        return self

    def __exit__(self, *_: object) -> None:
        with self._archive:
            if self._file is not None:
                self._file.close()
            for name, parts in self._parts.items():
                with self._open(name) as file:
                    _write_header(file, parts[0].dtype, self.shapes[name])
                    for part in parts:
                        file.write(np.ascontiguousarray(part).tobytes())

    def add(self, values: Mapping[str, np.ndarray]) -> None:
        """Adds the rows of a batch."""
        for name, rows in values.items():
            self.not_finite += int(rows.size - np.isfinite(rows).sum())
            before = self.shapes[name][0] if name in self.shapes else 0
            self.shapes[name] = (before + len(rows), *rows.shape[1:])
            if name == self._name and self._total is not None:
                self._write(rows, self._total)
            else:
                self._parts.setdefault(name, []).append(rows)

    def _write(self, rows: np.ndarray, total: int) -> None:
        if self._file is None:
            self._file = self._open(self._name)
            _write_header(self._file, rows.dtype, (total, *rows.shape[1:]))
        self._file.write(np.ascontiguousarray(rows).tobytes())

    def _open(self, name: str) -> IO[bytes]:
        return self._archive.open(f"{name}.npy", "w", force_zip64=True)


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(file, header)
