"""Runs a bundle on a file of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...calibration.feeds import batches
from ...common.writing import check_file, whole_file
from ...errors import FeedError, UsageError
from ..inputs import with_axes
from ..session import PROVIDERS, Runner, SessionOptions, check_array
from .bundle import Bundle
from .manifest import PortRecord

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
