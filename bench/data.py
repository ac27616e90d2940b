"""Labelled data from where a user names them: a file, a folder of images, or code."""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np

from ..common.locations import AnyPlace, local
from ..common.user_code import names_code
from ..data.feeds import (
    LABEL_NAMES,
    Array,
    Feed,
    LabelledBatch,
    Labels,
    check_classes,
    checked_labels,
    labelled_batches,
    npy_array,
    npz_archive,
    npz_array,
    npz_names,
    rebatched_pairs,
)
from ..data.shards import IMAGE, IMAGES, shard_batches, shards_of
from ..errors import FeedError, UsageError
from ..exporter.inputs import (
    SIZES,
    Inputs,
    fitted_arrays,
    random_arrays,
    random_inputs,
    with_axes,
)
from ..exporter.model import Model, TensorSpec
from .runners.base import first_of

InputsAndLabels = tuple[Inputs, Labels | None]
"""A batch: an array, or those of a model with several inputs by name, and its labels."""


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Inputs [samples, ...] and class labels [samples], without which accuracy is not known.

    `beside` are a model's further inputs, by name. `output` is the number of the output that the
    labels are of.
    """

    inputs: Array
    labels: Labels | None
    input_name: str = "input"
    label_name: str | None = None
    beside: Mapping[str, Array] = field(default_factory=dict)
    output: int = 0

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self)

    @property
    def labelled(self) -> bool:
        """Whether the inputs have labels."""
        return self.labels is not None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of inputs and labels: a sweep goes on only over the same."""
        return fingerprint(self.inputs, self.labels, *self.beside.values())

    def head(self, count: int) -> LabelledData:
        """Returns the first `count` samples, fewer where there are fewer."""
        labels = None if self.labels is None else self.labels[:count]
        beside = {name: array[:count] for name, array in self.beside.items()}
        return replace(self, inputs=self.inputs[:count], labels=labels, beside=beside)

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
        """Returns the `index`-th batch of exactly `size` inputs, going round the data."""
        return self._rows(np.arange(index * size, (index + 1) * size) % len(self))

    def _rows(self, rows: slice | Array) -> Inputs:
        main = np.ascontiguousarray(self.inputs[rows])
        if not self.beside:
            return main
        beside = {name: np.ascontiguousarray(array[rows]) for name, array in self.beside.items()}
        return {self.input_name: main, **beside}

    @property
    def feed(self) -> Feed:
        """The inputs as a feed, those of several inputs by name."""
        return [{self.input_name: self.inputs, **self.beside}] if self.beside else self.inputs

    def check_classes(self, classes: int) -> None:
        """Raises FeedError unless every label is a class of a model with `classes` outputs."""
        if self.labels is not None:
            check_classes(self.labels, classes, f"array '{self.label_name}'")


def fingerprint(*arrays: Array | None) -> str:
    """Returns the SHA-256 of some arrays: their kinds, shapes and values."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def load_groups(path: Path, name: str, samples: int) -> Array:
    """Returns the array `name` of an `.npz`, the subgroup [samples] of each input, or FeedError."""
    names = npz_names(path)
    if name not in names:
        raise FeedError(
            f"{path}: no array '{name}' to group the inputs by",
            hint=f"it holds {', '.join(names)}",
        )
    groups = npz_array(path, name)
    if groups.shape != (samples,) or groups.dtype.kind not in "biuU":
        raise FeedError(
            f"{path}: array '{name}' is {groups.dtype} of shape {groups.shape}; subgroups are a "
            f"number or a text for each of the {samples} inputs",
            hint="for one group and the rest, save True for its inputs and False for the others",
        )
    return groups


Pixels = Literal["unit", "symmetric", "imagenet"]
"""What an image's values become: 0..1, −1..1, or standardised as ImageNet models are trained."""

MEANS: dict[Pixels, tuple[Sequence[float], Sequence[float]]] = {
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "symmetric": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

CROP = 0.875  # the share of the shorter side that the middle of an image takes: 224 of 256
BATCH = 32
CHANNELS = (1, 3)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM")
"""What is read: Pillow would start other programs for some formats, whatever a file is called."""

PIXELS = 1 << 26
"""Of an image at most, as it is and at the model's size: 200 MB of bytes."""


@dataclass(frozen=True)
class Streamed:
    """Labelled data that are read anew for every pass, and never held whole."""

    pairs: Callable[[], Iterator[LabelledBatch]]
    samples: int | None
    labelled: bool
    fingerprint: str
    input_name: str = "input"
    output: int = 0

    def head(self, count: int) -> LabelledData:
        """Returns the first `count` samples, fewer where there are fewer."""
        for inputs, labels in self.stream(count, count):
            x = first_of(inputs)
            return LabelledData(x, labels, self.input_name, "label", output=self.output)
        raise FeedError("the data hold no samples", hint="give at least one input")

    def stream(self, size: int, limit: int | None = None) -> Iterator[InputsAndLabels]:
        """Yields batches of `size` samples, the last one shorter, up to `limit` samples."""
        return rebatched_pairs(self.pairs(), size, limit)


Labelled = LabelledData | Streamed
"""Where labelled inputs come from; they need not fit in memory."""

RANDOM_INPUTS = 16


def labelled(
    data: str | Path | Labelled | Array | None,
    model: Model,
    batch: int,
    pixels: str | None = None,
    sizes: Mapping[str, int] = SIZES,
) -> Labelled:
    """Returns the data of a benchmark; raises what `open_labelled` does.

    Random ones for None, of these `sizes` where an axis is dynamic.
    """
    if len(model.inputs) > 1 and not isinstance(data, LabelledData | Streamed):
        return several_inputs(data, model, max(batch, RANDOM_INPUTS), sizes)
    if isinstance(data, str | Path):
        labelled = open_labelled(str(data), model.input, pixels, output_names(model))
        return _whole_shape(labelled, model.input)
    if pixels is not None:
        raise UsageError(
            f"--pixels {pixels}: there is no folder of images", hint="give one with --data"
        )
    if data is None:
        data = random_inputs(model, max(batch, RANDOM_INPUTS), {**SIZES, **sizes})
    if isinstance(data, np.ndarray):
        data = LabelledData(data, None, model.input.name)
    return _whole_shape(data, model.input)


def _whole_shape(data: Labelled, spec: TensorSpec) -> Labelled:
    """The data with the axis that inputs may leave out: (batch, dim) for (batch, tokens, dim)."""
    if spec.implied is None:
        return data
    if isinstance(data, LabelledData):
        return replace(data, inputs=with_axes(data.inputs, spec))

    def pairs() -> Iterator[LabelledBatch]:
        for inputs, labels in data.pairs():
            yield with_axes(inputs, spec), labels

    return replace(data, pairs=pairs)


def output_names(model: Model) -> list[str]:
    """Returns the outputs by whose names an `.npz` may hold labels: those of several."""
    return [spec.name for spec in model.outputs] if len(model.outputs) > 1 else []


def _labelled_output(label: str | None, outputs: Sequence[str]) -> int:
    """The number of the output that an array of labels is of: the first, unless it has a name."""
    return outputs.index(label) if label in outputs else 0


def several_inputs(
    data: str | Path | Array | None, model: Model, count: int, sizes: Mapping[str, int] = SIZES
) -> LabelledData:
    """Returns data of a model with several inputs, `count` random ones for None.

    An `.npz` holds arrays called as the inputs are, and `label`; what is left out has its default.
    Raises FeedError for a file that is none, or does not fit.
    """
    name, labels, output = model.input.name, None, 0
    if data is None:
        arrays = random_arrays(model, count, {**SIZES, **sizes})
    elif isinstance(data, np.ndarray):
        arrays = fitted_arrays(data, model)
    else:
        path = local(data)
        if path.suffix != ".npz" or not path.is_file():
            raise FeedError(
                f"{path}: is no .npz file",
                hint=f"a model with several inputs is measured on an .npz with '{name}', and "
                "'label' where there are any",
            )
        known = [spec.name for spec in model.inputs]
        held = npz_archive(path, name, known[1:], output_names(model))
        output = _labelled_output(held.label, output_names(model))
        inputs = {
            npz_name: npz_array(path, npz_name) for npz_name in npz_names(path) if npz_name in known
        }
        arrays = fitted_arrays({name: npz_array(path, held.inputs)} | inputs, model)
        if held.label is not None:
            where, ids = f"{path}: array '{held.label}'", arrays[name]
            classes = npz_array(path, held.label)
            labels = checked_labels(classes, ids.dtype, ids.shape, where, f"'{held.inputs}'")
    main = arrays.pop(name)
    return LabelledData(
        inputs=main,
        labels=labels,
        input_name=name,
        label_name=LABEL_NAMES[0],
        beside=arrays,
        output=output,
    )


def open_labelled(
    where: str, spec: TensorSpec, pixels: str | None = None, outputs: Sequence[str] = ()
) -> Labelled:
    """Returns the labelled data that `where` names, for a model that takes `spec`.

    An `.npz` holds inputs and labels, which may be called as one of several `outputs` is; a folder
    holds a folder of images per class, in the order of their names, or `.npy` batches without
    labels; shards hold arrays or images and their classes;
    `package.module:iterable` yields (inputs, labels) or a dict with both. All but code may be URLs.
    Raises FeedError for what is none of these, UsageError where `pixels` is missing for images, or
    given for anything else.
    """
    shards = shards_of(where)
    if shards is not None and (pixels is not None or holds_images(shards)):
        return image_shards(where, shards, spec, pixels)
    path = local(where) if shards is None else Path(where)
    if shards is None and path.is_dir() and not any(path.glob("*.npy")):
        return image_folder(path, spec, pixels)
    if pixels is not None:
        raise UsageError(
            f"--pixels {pixels}: {where} is no folder of images",
            hint="leave it out: other inputs are taken as they are",
        )
    if shards is None and not path.is_dir() and not names_code(where):
        if not path.is_file():
            raise FeedError(
                f"{path}: no such file", hint="give an .npz file with inputs and labels"
            )
        held = npz_archive(path, spec.name, outputs=outputs)
        pairs = partial(_pairs, where, held.inputs, outputs)
        samples = held.header.shape[0]
        if samples == 0 or next(pairs(), None) is None:
            raise FeedError(f"{path}: array '{held.inputs}' holds no samples")
        return Streamed(
            pairs=pairs,
            samples=samples,
            labelled=held.label is not None,
            fingerprint=held.digest,
            input_name=held.inputs,
            output=_labelled_output(held.label, outputs),
        )
    # A folder of arrays, or what code yields, can only be told from what comes first.
    nothing = FeedError(f"{where}: yields nothing", hint="yield (inputs, labels) batches")
    return _told_by_first(partial(_pairs, where, spec.name), where, spec, nothing)


def _told_by_first(
    pairs: Callable[[], Iterator[LabelledBatch]], source: str, spec: TensorSpec, nothing: FeedError
) -> Streamed:
    """Data of which only the first batch tells something; raises `nothing` where there is none."""
    first = next(pairs(), None)
    if first is None:
        raise nothing
    return Streamed(
        pairs=pairs,
        samples=None,
        labelled=first[1] is not None,
        fingerprint=f"{source} {fingerprint(*first)}",
        input_name=spec.name,
    )


def _pairs(where: str, name: str, outputs: Sequence[str] = ()) -> Iterator[LabelledBatch]:
    """The inputs called `name`, floats as FP32, and their labels."""
    for inputs, labels in labelled_batches(where, name, outputs):
        if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
            raise FeedError(f"{where}: input '{name}' holds NaN or infinite values")
        yield inputs.astype(np.float32, copy=False) if inputs.dtype.kind == "f" else inputs, labels


def image_folder(folder: Path, spec: TensorSpec, pixels: str | None) -> Streamed:
    """Returns the images of a folder per class; class i is the i-th folder by name.

    An image of the model's own size is taken as it is. Every other one is resized with its shorter
    side to what CROP makes the model's size, and cut to its middle. All are scaled as `pixels`
    says. Raises FeedError that names a file which is no image.
    """
    files = _image_files(folder)
    scale = image_scale(f"{folder}: is a folder of images", spec, pixels)

    def pairs() -> Iterator[LabelledBatch]:
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            images = np.stack([read_image(file, spec, scale) for file, _ in part])
            yield images, np.array([label for _, label in part], np.int64)

    digest = hashlib.sha256(f"{pixels} {spec.shape}".encode())
    for file, label in files:
        facts = file.stat()
        digest.update(f"{file} {label} {facts.st_size} {facts.st_mtime_ns}".encode())
    return Streamed(pairs, len(files), labelled=True, fingerprint=digest.hexdigest())


def image_scale(where: str, spec: TensorSpec, pixels: str | None) -> Pixels:
    """Returns how images are scaled; UsageError where that is not said, or the model takes none."""
    if len(spec.shape) != 4 or not all(isinstance(size, int) for size in spec.shape[1:]):
        raise UsageError(
            f"{where}, and the model takes {spec.shape}",
            hint="images need a model of (batch, channels, height, width), or with the channels "
            "last; use an .npz",
        )
    if pixels not in get_args(Pixels):
        problem = (
            f"--pixels {pixels}: there is no such scale" if pixels else f"{where}, without --pixels"
        )
        raise UsageError(
            f"{problem}; how the model was trained to see images cannot be told from its weights",
            hint="--pixels unit (0 to 1), symmetric (−1 to 1) or imagenet (mean and deviation)",
        )
    return cast(Pixels, pixels)


def holds_images(shards: Sequence[AnyPlace]) -> bool:
    """Whether the first sample of some shards is an image."""
    return any(IMAGE in fields for _, fields in islice(shard_batches(shards, npy_array), 1))


def image_shards(
    where: str, shards: Sequence[AnyPlace], spec: TensorSpec, pixels: str | None
) -> Streamed:
    """Returns the images of shards and their classes, read as those of `image_folder` are."""
    scale = image_scale(f"{where}: holds images", spec, pixels)

    def pairs() -> Iterator[LabelledBatch]:
        for place, fields in shard_batches(shards, npy_array):
            if IMAGE not in fields:
                raise FeedError(f"{place}: a sample without an image", hint="leave --pixels out")
            files = ((io.BytesIO(data), f"{place}: an image") for data in fields[IMAGE])
            images = np.stack([read_image(file, spec, scale, name) for file, name in files])
            labels = next((fields[name] for name in LABEL_NAMES if name in fields), None)
            if labels is not None:
                labels = checked_labels(labels, images.dtype, images.shape, place, "the shard")
            yield images, labels

    nothing = FeedError(f"{where}: holds no samples")
    return _told_by_first(pairs, f"{where} {pixels}", spec, nothing)


def _image_files(folder: Path) -> list[tuple[Path, int]]:
    """Every image and its class, classes mixed: the first samples should not be all of one."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    files: list[tuple[int, int, Path]] = []
    for label, class_folder in enumerate(classes):
        images = sorted(f for f in class_folder.rglob("*") if f.suffix.lower() in IMAGES)
        files += [(place, label, file) for place, file in enumerate(images)]
    if not files:
        raise FeedError(
            f"{folder}: holds no images in a folder per class, and no .npy files",
            hint="folder/CLASS/image.png, classes in the order of their names; or an .npz",
        )
    return [(file, label) for _, label, file in sorted(files)]


def read_image(file: Path | io.BytesIO, spec: TensorSpec, pixels: Pixels, name: str = "") -> Array:
    """Returns one image as float32 in the layout of a model's; `name` is what errors call it.

    Channels come first, or last where only that can be meant: (batch, 224, 224, 3).
    """
    from PIL import Image

    _, channels, height, width = spec.shape
    last = width in CHANNELS and channels not in CHANNELS
    if last:
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
            _check_pixels(opened.size, size, name or str(file))
            image = opened.convert("L" if channels == 1 else "RGB")
    except FeedError:
        raise
    except Exception as error:  # each format's reader fails in its own way
        raise FeedError(f"{name or file}: is not an image that can be read ({error})") from error
    if image.size != (width, height):
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    values = np.asarray(image, np.float32).reshape(height, width, channels) / 255
    mean, deviation = (np.asarray(scale[:channels], np.float32) for scale in MEANS[pixels])
    scaled: Array = ((values - mean) / deviation).astype(np.float32)
    return scaled if last else np.ascontiguousarray(scaled.transpose(2, 0, 1))


def _check_pixels(size: tuple[int, int], resized: tuple[int, int], where: str) -> None:
    if max(math.prod(size), math.prod(resized)) > PIXELS:
        raise FeedError(
            f"{where}: an image of {size[0]} x {size[1]}, and of {resized[0]} x {resized[1]} for "
            f"the model; {PIXELS} pixels are allowed",
            hint="make it smaller, or leave it out",
        )
