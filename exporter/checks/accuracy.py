"""Labels and a user's own outputs in a feed: correct answers, and distances between outputs.

None of this needs PyTorch: `verify` scores graphs without it in the same way as an export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from ...common.locations import local
from ...data.arrays import npz_archive, npz_names
from ...data.batches import (
    IGNORED,
    IMAGE,
    LABEL,
    OUTPUT,
    Feed,
    Fields,
    Labels,
    limited,
    rebatched,
    row_count,
)
from ...data.feeds import named_batches
from ...data.shards import shard_batches, shards_of
from ...errors import FeedError
from ..inputs import HasPorts, fitted_arrays

COUNT = 256
"""The number of inputs of a feed that are evaluated by default."""

MAX_CHANGED = 0.01
"""The share of integer outputs (classes, masks) that may differ."""


@dataclass(frozen=True, slots=True)
class Score:
    """The number of correct answers (`right`) among those with a label (`of`)."""

    right: int = 0
    of: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.right + other.right, self.of + other.of)

    @property
    def text(self) -> str:
        """In words: `93.6% (337 of 360)`."""
        return f"{self.right / self.of:.1%} ({self.right:,} of {self.of:,})"


def one_per_sample(y: np.ndarray, labels: Labels | None = None) -> np.ndarray:
    """Returns y; scores [b, 1, c] of a head that treats vectors as single tokens, as [b, c]."""
    tokens = labels is not None and labels.shape == y.shape[:2]
    return y[:, 0] if y.ndim == 3 and y.shape[1] == 1 and not tokens else y


def score(y: np.ndarray, labels: Labels) -> Score | None:
    """Returns how many answers equal the labels; None for outputs that are not such scores.

    For classes, the answer is the largest output; for attributes [b, o], 0 or 1, each sign.
    """
    y = one_per_sample(y, labels)
    if y.dtype.kind != "f":
        return None
    attributes = labels[:, None] if labels.ndim == 1 and y.shape == (len(labels), 1) else labels
    if y.shape == attributes.shape and bool(((attributes == 0) | (attributes == 1)).all()):
        right = ((y > 0) == (attributes == 1)) & np.isfinite(y)
        return Score(int(right.sum()), right.size)
    if y.shape[:-1] != labels.shape or y.shape[-1] < 2 or (labels != np.round(labels)).any():
        return None
    counted = labels != IGNORED
    if counted.any() and not 0 <= labels[counted].min() <= labels[counted].max() < y.shape[-1]:
        return None
    answers = np.where(np.isfinite(y).all(axis=-1), y.argmax(axis=-1), IGNORED - 1)
    return Score(int(((answers == labels) & counted).sum()), int(counted.sum()))


@dataclass(frozen=True, slots=True)
class GraphAnswers:
    """A graph's results on a feed: its accuracy, and how far it is from a user's own outputs.

    `apart` has each input's largest difference of an output over its max|y|; empty without outputs
    in the feed. `agreeing` counts inputs with the same largest number in the first output.
    `unscored` is the output that labels of the feed do not fit; None if they do, or without labels.
    """

    inputs: int
    accuracy: Score | None
    apart: np.ndarray
    agreeing: int
    unscored: str | None = None


def no_accuracy(output: str) -> str:
    """Returns why an output has no accuracy although it has labels."""
    return (
        "the labels of --data are neither classes nor attributes of this model's output "
        f"'{output}': no accuracy was measured"
    )


def evaluate(
    run: Callable[[Fields], Mapping[str, np.ndarray]],
    ports: HasPorts,
    data: Feed,
    batch: int,
    fixed: Mapping[str, int],
    count: int = COUNT,
) -> GraphAnswers | None:
    """Returns a graph's results on the first inputs of a feed; `run` computes batches of them.

    None if the feed has neither labels nor outputs. Raises `FeedError` for inputs and outputs
    that do not fit.
    """
    names, labelled = output_names(ports), output_names(ports)[labelled_output(ports, data)]
    inputs, total, scored, agreeing, any_labels = 0, Score(), True, 0, False
    apart: list[np.ndarray] = []
    for part in rebatched(fields_of(ports, data, count), batch):
        theirs = {name: part.pop(name) for name in names if name in part}
        labels = part.pop(LABEL, None)
        if (labels is None and not theirs) or ("batch" in fixed and row_count(part) < batch):
            continue
        values = run(arrays_of(part, ports, fixed))
        found = None if labels is None else score(values[labelled], labels)
        scored &= found is not None
        any_labels |= labels is not None
        total += found or Score()
        inputs += row_count(part)
        if theirs:
            apart.append(_largest_differences(theirs, values))
            agreeing += agreeing_inputs(theirs, values)
    if not inputs:
        return None
    differences = np.concatenate(apart) if apart else np.empty(0)
    accuracy = total if scored and total.of else None
    unscored = labelled if any_labels and accuracy is None else None
    return GraphAnswers(inputs, accuracy, differences, agreeing, unscored)


def agreeing_inputs(theirs: Fields, values: Mapping[str, np.ndarray]) -> int:
    """Returns for how many inputs the largest number of the first output is at the same index."""
    first = next(iter(theirs))
    if theirs[first].ndim < 2:  # a single number is always the largest
        return len(theirs[first])
    same = theirs[first].argmax(axis=-1) == values[first].argmax(axis=-1)
    return int(same.reshape(len(same), -1).all(axis=1).sum())


def _largest_differences(theirs: Fields, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns how far each input's outputs differ, over max|y|; for integers, the share that do."""
    rows = row_count(theirs)
    apart = np.zeros(rows)
    for name, array in theirs.items():
        check_own(array, values[name], name)
        if values[name].dtype.kind == "f":
            off, largest = distances(array, values[name])
            found = off / np.where(largest > 0, largest, 1.0)
        else:
            found = (array != values[name]).reshape(rows, -1).mean(axis=1)
        apart = np.maximum(apart, found)
    return apart


def arrays_of(part: Fields, model: HasPorts, fixed: Mapping[str, int] | None) -> Fields:
    """Returns all inputs of a batch; missing steering strengths are zeros, which have no effect."""
    rows = row_count(part)
    zeros = {
        spec.name: np.zeros(spec.concrete({"batch": rows}), dtype=spec.dtype)
        for spec in model.inputs
        if spec.default == "zeros" and spec.name not in part
    }
    return fitted_arrays({**part, **zeros}, model, fixed)


def output_names(model: HasPorts) -> list[str]:
    return [spec.name for spec in model.outputs]


def fields_of(model: HasPorts, data: Feed, count: int) -> Iterator[Fields]:
    """Yields the inputs of a feed with any labels and outputs of the user's own model."""
    names, outputs = [spec.name for spec in model.inputs], output_names(model)
    several = outputs if len(outputs) > 1 else ()
    read = named_batches(data, names, labelled=True, outputs=several, own=outputs, strict=False)
    return limited(read, count)


def is_images_or_text(data: Feed) -> bool:
    """Whether a feed consists of image files or is a text file, which other code reads."""
    if not isinstance(data, str | Path):
        return False
    shards = shards_of(data)
    if shards is not None:
        return any(IMAGE in fields for _, fields in islice(shard_batches(shards), 1))
    path = local(data)
    if path.is_dir():
        return not any(path.glob("*.npy"))
    return path.is_file() and path.suffix not in (".npz", ".npy")


def labelled_output(model: HasPorts, data: Feed) -> int:
    """Returns the index of the labelled output: the first, unless a label names another."""
    outputs = output_names(model)
    if len(outputs) < 2 or not isinstance(data, str | Path):
        return 0
    path = local(data)
    if path.suffix != ".npz" or not path.is_file():
        return 0
    names = [spec.name for spec in model.inputs]
    label = npz_archive(path, names[0], names[1:], outputs).label
    return outputs.index(label) if label in outputs else 0


def unread_arrays(model: HasPorts, data: Feed | None) -> list[str]:
    """Returns a sentence on the arrays of an archive that nothing reads; empty if all are read."""
    if not isinstance(data, str | Path) or local(data).suffix != ".npz":
        return []
    path, names = local(data), [spec.name for spec in model.inputs]
    archive = npz_archive(path, names[0], names[1:], output_names(model))
    read = {archive.inputs, *names, archive.label, *output_names(model), OUTPUT}
    others = ", ".join(f"'{name}'" for name in npz_names(path) if name not in read)
    if not others:
        return []
    return [f"{data}: nothing reads {others}; labels must be an array 'label', 'labels' or 'y'"]


def distances(y: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each input's largest difference, and its largest number, in float64."""
    rows = len(y)
    y, other = (np.asarray(array, np.float64).reshape(rows, -1) for array in (y, other))
    return np.abs(y - other).max(axis=1, initial=0.0), np.abs(y).max(axis=1, initial=0.0)


def epsilon(array: np.ndarray) -> float:
    """Returns the rounding error of a feed's outputs in their type; only that of FP16 matters."""
    return float(np.finfo(array.dtype).eps) if array.dtype == np.float16 else 0.0


def check_own(theirs: np.ndarray, ours: np.ndarray, name: str) -> None:
    """Raises `FeedError` for arrays that cannot be outputs of this model."""
    if theirs.shape != ours.shape:
        raise FeedError(
            f"--data: the outputs of your own model have the shape {('batch', *theirs.shape[1:])}, "
            f"but '{name}' of this one has {('batch', *ours.shape[1:])}",
            hint="save the outputs of the model for these inputs, before any argmax or softmax, as "
            f"'{OUTPUT}' or '{name}'",
        )
    if theirs.dtype.kind == "f" and not np.isfinite(theirs).all():
        raise FeedError(
            f"--data: the outputs of your own model contain NaN or Inf ('{name}')",
            hint="leave such inputs out",
        )
