"""Labelled data from a file, a folder of images, or code."""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..common.locations import AnyPlace, local
from ..data.arrays import LABEL_NAMES, label_names, npz_archive, npz_array, npz_names
from ..data.batches import IMAGE, LABEL, Array, Feed, LabelledBatch, Labels, joined, rebatched_pairs
from ..data.feeds import check_classes, checked_labels, fields_of, in_memory, named_batches
from ..data.pixels import SCALES, UNKNOWN, Pixels, check_pixels
from ..data.shards import IMAGES, shard_batches, shards_of
from ..data.user_code import names_code
from ..errors import FeedError, UsageError
from ..exporter.checks.accuracy import is_images_or_text
from ..exporter.inputs import SIZES, Inputs, fitted_arrays, random_arrays, with_axes
from ..exporter.model import Model, TensorSpec
from .runners.base import first_of

InputsAndLabels = tuple[Inputs, Labels | None]
"""A batch: an array, or the arrays of several inputs by name, with its labels."""


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Inputs [samples, ...] and their labels, without which accuracy is unknown.

    `others` has a model's other inputs by name. `output` is the index of the output that the
    labels belong to.
    """

    inputs: Array
    labels: Labels | None
    input_name: str = "input"
    label_name: str | None = None
    others: Mapping[str, Array] = field(default_factory=dict)
    output: int = 0
    skipped: int = 0
    """The number of earlier samples that were left out (`after`)."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def samples(self) -> int:
        return len(self)

    @property
    def labelled(self) -> bool:
        return self.labels is not None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of inputs and labels: a sweep only continues with the same data."""
        return fingerprint(self.inputs, self.labels, *self.others.values())

    def head(self, count: int) -> LabelledData:
        """Returns the first `count` samples, or all if there are fewer."""
        return self._between(0, count)

    def after(self, count: int) -> LabelledData:
        """Returns all but the first `count` samples."""
        return self._between(count, None)

    def _between(self, start: int, end: int | None) -> LabelledData:
        return replace(
            self,
            inputs=self.inputs[start:end],
            labels=None if self.labels is None else self.labels[start:end],
            others={name: array[start:end] for name, array in self.others.items()},
            skipped=self.skipped + start,
        )

    def stream(self, size: int, limit: int | None = None) -> Iterator[InputsAndLabels]:
        """Yields batches of `size` samples, the last one shorter, up to `limit` samples."""
        for rows in self.batches(size, limit):
            yield self._rows(rows), None if self.labels is None else self.labels[rows]

    def batches(self, size: int, limit: int | None = None) -> Iterator[slice]:
        """Yields slices of `size` samples that cover the data; the last one may be shorter."""
        end = len(self) if limit is None else min(limit, len(self))
        for start in range(0, end, size):
            yield slice(start, min(start + size, end))

    def batch(self, index: int, size: int) -> Inputs:
        """Returns the `index`-th batch of exactly `size` inputs, repeating the data if needed."""
        return self._rows(np.arange(index * size, (index + 1) * size) % len(self))

    def _rows(self, rows: slice | Array) -> Inputs:
        main = np.ascontiguousarray(self.inputs[rows])
        if not self.others:
            return main
        others = {name: np.ascontiguousarray(array[rows]) for name, array in self.others.items()}
        return {self.input_name: main, **others}

    @property
    def feed(self) -> Feed:
        """The inputs as a feed: an array, or several arrays by name."""
        return [{self.input_name: self.inputs, **self.others}] if self.others else self.inputs

    def check_classes(self, classes: int) -> None:
        """Raises FeedError unless every label is a class of a model with `classes` outputs."""
        if self.labels is not None:
            check_classes(self.labels, classes, f"array '{self.label_name}'")


def fingerprint(*arrays: Array | None) -> str:
    """Returns the SHA-256 of arrays: their types, shapes and values."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def load_groups(data: Path | Mapping[str, Any], name: str, samples: int) -> Array:
    """Returns the array `name` of an `.npz` or a dict: the subgroup of each input [samples].

    Raises FeedError if it is missing or invalid.
    """
    names = [*data] if isinstance(data, Mapping) else npz_names(data)
    where = "the data" if isinstance(data, Mapping) else data
    if name not in names:
        raise FeedError(
            f"{where} has no array '{name}' to group the inputs by",
            hint=f"it contains {', '.join(names)}",
        )
    given = in_memory(data)[name] if isinstance(data, Mapping) else npz_array(data, name)
    groups = np.asarray(given)
    if groups.shape != (samples,) or groups.dtype.kind not in "biuU":
        raise FeedError(
            f"{where}: array '{name}' is {groups.dtype} of shape {groups.shape}; subgroups are an "
            f"integer, a Boolean or a string for each of the {samples} inputs",
            hint="to compare a group with all others, save True for its inputs and False otherwise",
        )
    return groups


NORMALIZATION: dict[Pixels, tuple[Sequence[float], Sequence[float]]] = {
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "symmetric": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

CROP = 0.875  # the share of the shorter side that is cropped from the centre: 224 of 256
BATCH = 32
CHANNELS = (1, 3)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM")
"""The only formats to read: for some others Pillow starts programs, whatever the file name."""

PIXELS = 1 << 26
"""The largest number of pixels in an image, also after resizing to the model's size: 200 MB."""


@dataclass(frozen=True)
class Streamed:
    """Labelled data that are read again for every pass and are never all in memory."""

    pairs: Callable[[], Iterator[LabelledBatch]]
    samples: int | None
    labelled: bool
    fingerprint: str
    input_name: str = "input"
    output: int = 0
    skipped: int = 0

    def after(self, count: int) -> Streamed:
        """Returns all but the first `count` samples, which every pass still reads."""

        def pairs() -> Iterator[LabelledBatch]:
            remaining = count
            for inputs, labels in self.pairs():
                skip, remaining = min(remaining, len(inputs)), max(0, remaining - len(inputs))
                if skip < len(inputs):
                    yield inputs[skip:], None if labels is None else labels[skip:]

        samples = None if self.samples is None else self.samples - count
        return replace(self, pairs=pairs, samples=samples, skipped=self.skipped + count)

    def head(self, count: int) -> LabelledData:
        for inputs, labels in self.stream(count, count):
            x = first_of(inputs)
            return LabelledData(
                x, labels, self.input_name, "label", output=self.output, skipped=self.skipped
            )
        raise FeedError("the data contain no samples", hint="give at least one input")

    def stream(self, size: int, limit: int | None = None) -> Iterator[InputsAndLabels]:
        return rebatched_pairs(self.pairs(), size, limit)


Labelled = LabelledData | Streamed
"""Labelled inputs, which do not have to fit in memory."""

RANDOM_INPUTS = 16


def labelled(
    data: str | Path | Labelled | Array | Mapping[str, Any] | None,
    model: Model,
    batch: int,
    pixels: str | None = None,
    sizes: Mapping[str, int] = SIZES,
) -> Labelled:
    """Returns the data of a benchmark; raises the errors of `open_labelled`.

    If `data` is None, the inputs are random, with `sizes` along dynamic axes.
    """
    name = model.input.name
    if not isinstance(data, LabelledData | Streamed):
        data = in_memory(data)
    if pixels is not None and not isinstance(data, str | Path):
        check_pixels(pixels, given=False)
    if data is None:
        arrays = random_arrays(model, max(batch, RANDOM_INPUTS), {**SIZES, **sizes})
        data = LabelledData(arrays.pop(name), None, name, others=arrays)
    elif isinstance(data, Mapping):
        data = _from_arrays(data, model)
    elif isinstance(data, str | Path | np.ndarray) and len(model.inputs) > 1:
        data = several_inputs(data, model)
    elif isinstance(data, str | Path):
        data = open_labelled(str(data), model.input, pixels, output_names(model))
    elif isinstance(data, np.ndarray):
        data = LabelledData(data, None, name)
    if not isinstance(data, LabelledData | Streamed):
        raise FeedError(
            f"--data: a {type(data).__name__} cannot be read as labelled inputs",
            hint="give an array, a dict of arrays by name, or a path or URL",
        )
    return _with_omitted_axis(data, model.input)


def ids_of(
    data: str | Path | Array | Mapping[str, Any] | None, model: Model
) -> str | Path | Array | None:
    """Returns the path or array of a model's sequences; from a dict, the main input."""
    given = in_memory(data)
    if isinstance(given, Mapping):
        return fields_of(given, [model.input.name])[model.input.name]
    sequences: str | Path | Array | None = given
    return sequences


def _from_arrays(data: Path | Mapping[str, Array], model: Model) -> LabelledData:
    """Returns the data of an `.npz` or a dict: arrays by input name, and labels."""
    names, outputs = [spec.name for spec in model.inputs], output_names(model)
    if isinstance(data, Path):
        label = npz_archive(data, names[0], names[1:], outputs).label
    else:
        label = next((name for name in label_names(names, outputs) if name in data), None)
    labelled = LABEL not in names  # otherwise that array is an input
    inputs = joined([*named_batches(data, names, labelled=labelled, outputs=outputs)])
    labels = inputs.pop(LABEL, None) if labelled else None
    if len(names) > 1:
        inputs = fitted_arrays(inputs, model)
    main = inputs.pop(names[0])
    return LabelledData(
        inputs=main if inputs else _finite(main, names[0], "the data"),
        labels=labels,
        input_name=names[0],
        label_name=label,
        others=inputs,
        output=_labelled_output(label, outputs),
    )


def _finite(inputs: Array, name: str, where: str) -> Array:
    """Returns inputs with floats as FP32; raises `FeedError` for NaN or infinite values."""
    if inputs.dtype.kind != "f":
        return inputs
    if not np.isfinite(inputs).all():
        raise FeedError(f"{where}: input '{name}' contains NaN or infinite values")
    return inputs.astype(np.float32, copy=False)


def _with_omitted_axis(data: Labelled, spec: TensorSpec) -> Labelled:
    """Returns the data with an omitted axis inserted: (batch, dim) becomes (batch, 1, dim)."""
    if spec.implied is None:
        return data
    if isinstance(data, LabelledData):
        return replace(data, inputs=with_axes(data.inputs, spec))

    def pairs() -> Iterator[LabelledBatch]:
        for inputs, labels in data.pairs():
            yield with_axes(inputs, spec), labels

    return replace(data, pairs=pairs)


def output_names(model: Model) -> list[str]:
    """Returns the output names that labels may have in an `.npz`; empty for one output."""
    return [spec.name for spec in model.outputs] if len(model.outputs) > 1 else []


def _labelled_output(label: str | None, outputs: Sequence[str]) -> int:
    """Returns the index of the output with the labels: the first, unless `label` names another."""
    return outputs.index(label) if label in outputs else 0


def several_inputs(data: str | Path | Array, model: Model) -> LabelledData:
    """Returns data for a model with several inputs.

    An `.npz` has arrays with the inputs' names, and `label`; omitted inputs have defaults. Raises
    FeedError for a file that is invalid or does not fit.
    """
    name = model.input.name
    if isinstance(data, np.ndarray):
        return _from_arrays({name: data}, model)
    path = local(data)
    if path.suffix != ".npz" or not path.is_file():
        raise FeedError(
            f"{path}: not an .npz file",
            hint=f"a model with several inputs is measured on an .npz with '{name}', and "
            "optionally 'label'",
        )
    return _from_arrays(path, model)


def open_labelled(
    where: str, spec: TensorSpec, pixels: str | None = None, outputs: Sequence[str] = ()
) -> Labelled:
    """Returns the labelled data at `where`, for a model with the input `spec`.

    An `.npz` has inputs and labels, which may have the name of one of several `outputs`; a folder
    has a folder of images per class, sorted by name, or `.npy` batches without labels; shards have
    arrays or images and their classes; `package.module:iterable` yields (inputs, labels) or a dict
    with both. All except code may be URLs. Raises FeedError for anything else, and UsageError if
    `pixels` is missing for images or given for other data.
    """
    shards = shards_of(where)
    if shards is not None and (pixels is not None or is_images_or_text(where)):
        return _image_shards(where, shards, spec, pixels)
    path = local(where) if shards is None else Path(where)
    if shards is None and path.is_dir() and not any(path.glob("*.npy")):
        return _image_folder(path, spec, pixels)
    if pixels is not None:
        raise UsageError(
            f"--pixels {pixels}: {where} is not a folder of images",
            hint="leave --pixels out: inputs other than images are used unchanged",
        )
    if shards is None and not path.is_dir() and not names_code(where):
        if not path.is_file():
            raise FeedError(
                f"{path}: no such file", hint="give an .npz file with inputs and labels"
            )
        archive = npz_archive(path, spec.name, outputs=outputs)
        pairs = partial(_pairs, where, archive.inputs, outputs)
        samples = archive.header.shape[0]
        if samples == 0 or next(pairs(), None) is None:
            raise FeedError(f"{path}: array '{archive.inputs}' contains no samples")
        return Streamed(
            pairs=pairs,
            samples=samples,
            labelled=archive.label is not None,
            fingerprint=archive.digest,
            input_name=archive.inputs,
            output=_labelled_output(archive.label, outputs),
        )
    # For a folder of arrays, or code, only the first batch shows what the data are.
    empty = FeedError(f"{where} yields no batches", hint="yield (inputs, labels) batches")
    return _from_first_batch(partial(_pairs, where, spec.name), where, spec, empty)


def _from_first_batch(
    pairs: Callable[[], Iterator[LabelledBatch]], source: str, spec: TensorSpec, empty: FeedError
) -> Streamed:
    """Returns data of which only the first batch is known; raises `empty` if there is none."""
    first = next(pairs(), None)
    if first is None:
        raise empty
    return Streamed(
        pairs=pairs,
        samples=None,
        labelled=first[1] is not None,
        fingerprint=f"{source} {fingerprint(*first)}",
        input_name=spec.name,
    )


def _pairs(where: str, name: str, outputs: Sequence[str] = ()) -> Iterator[LabelledBatch]:
    """Yields the inputs called `name`, with floats as FP32, and their labels."""
    for batch in named_batches(where, [name], labelled=True, outputs=outputs):
        yield _finite(batch[name], name, where), batch.get(LABEL)


def _image_folder(folder: Path, spec: TensorSpec, pixels: str | None) -> Streamed:
    """Returns the images of one folder per class; class i is the i-th folder by name.

    Images of the model's size are used unchanged. Others are resized so that CROP of the shorter
    side is the model's size, and cropped to the center. `pixels` selects the scale of values.
    Raises FeedError naming a file that is not an image.
    """
    files = _image_files(folder)
    scale = _image_scale(f"{folder} is a folder of images", spec, pixels)

    def pairs() -> Iterator[LabelledBatch]:
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            images = np.stack([read_image(file, spec, scale) for file, _ in part])
            yield images, np.array([label for _, label in part], np.int64)

    digest = hashlib.sha256(f"{pixels} {spec.shape}".encode())
    for file, label in files:
        status = file.stat()
        digest.update(f"{file} {label} {status.st_size} {status.st_mtime_ns}".encode())
    return Streamed(pairs, len(files), labelled=True, fingerprint=digest.hexdigest())


def _image_scale(where: str, spec: TensorSpec, pixels: str | None) -> Pixels:
    """Returns the scale of images; UsageError if it is missing or the model takes no images."""
    if len(spec.shape) != 4 or not all(isinstance(size, int) for size in spec.shape[1:]):
        raise UsageError(
            f"{where}, but the model's input is {spec.shape}",
            hint="images need a model with inputs (batch, channels, height, width), or with the "
            "channels last; use an .npz",
        )
    if pixels is None:
        raise UsageError(f"{where}, but --pixels is missing; {UNKNOWN}", hint=SCALES)
    check_pixels(pixels)
    return cast(Pixels, pixels)


def _image_shards(
    where: str, shards: Sequence[AnyPlace], spec: TensorSpec, pixels: str | None
) -> Streamed:
    """Returns the images of shards and their classes, read as in `_image_folder`."""
    scale = _image_scale(f"{where} contains images", spec, pixels)

    def pairs() -> Iterator[LabelledBatch]:
        for shard, fields in shard_batches(shards):
            if IMAGE not in fields:
                raise FeedError(f"{shard} has a sample without an image", hint="leave --pixels out")
            files = ((io.BytesIO(data), f"{shard}: an image") for data in fields[IMAGE])
            images = np.stack([read_image(file, spec, scale, name) for file, name in files])
            labels = next((fields[name] for name in LABEL_NAMES if name in fields), None)
            if labels is not None:
                labels = checked_labels(labels, images.dtype, images.shape, shard, "the shard")
            yield images, labels

    empty = FeedError(f"{where} contains no samples")
    return _from_first_batch(pairs, f"{where} {pixels}", spec, empty)


def _image_files(folder: Path) -> list[tuple[Path, int]]:
    """Returns every image and its class, with classes mixed, so that the first samples vary."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    files: list[tuple[int, int, Path]] = []
    for label, class_folder in enumerate(classes):
        images = sorted(f for f in class_folder.rglob("*") if f.suffix.lower() in IMAGES)
        files += [(index, label, file) for index, file in enumerate(images)]
    if not files:
        raise FeedError(
            f"{folder} contains neither a folder of images per class nor .npy files",
            hint="use folder/CLASS/image.png, with classes in the order of their names, or an .npz",
        )
    return [(file, label) for _, label, file in sorted(files)]


def read_image(file: Path | io.BytesIO, spec: TensorSpec, pixels: Pixels, name: str = "") -> Array:
    """Returns one image as float32 in the model's layout; `name` identifies it in errors.

    Channels come first, or last if the shape is unambiguous: (batch, 224, 224, 3).
    """
    from PIL import Image

    _, channels, height, width = spec.shape
    channels_last = width in CHANNELS and channels not in CHANNELS
    if channels_last:
        channels, height, width = width, channels, height
    assert isinstance(channels, int) and isinstance(height, int) and isinstance(width, int)
    try:
        with warnings.catch_warnings(), Image.open(file, formats=FORMATS) as opened:
            warnings.simplefilter("ignore")
            ratio = max(height, width) / CROP / min(opened.size)
            size = (
                max(width, round(opened.width * ratio)),
                max(height, round(opened.height * ratio)),
            )
            _check_size(opened.size, size, name or str(file))
            image = opened.convert("L" if channels == 1 else "RGB")
    except FeedError:
        raise
    except Exception as error:  # each format's reader has its own exceptions
        raise FeedError(f"{name or file}: not a readable image ({error})") from error
    if image.size != (width, height):
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    values = np.asarray(image, np.float32).reshape(height, width, channels) / 255
    mean, deviation = (np.asarray(scale[:channels], np.float32) for scale in NORMALIZATION[pixels])
    scaled: Array = ((values - mean) / deviation).astype(np.float32)
    return scaled if channels_last else np.ascontiguousarray(scaled.transpose(2, 0, 1))


def _check_size(size: tuple[int, int], resized: tuple[int, int], where: str) -> None:
    if max(math.prod(size), math.prod(resized)) > PIXELS:
        raise FeedError(
            f"{where}: the image is {size[0]} x {size[1]}, and {resized[0]} x {resized[1]} after "
            f"resizing; the limit is {PIXELS} pixels",
            hint="make the image smaller, or leave it out",
        )
