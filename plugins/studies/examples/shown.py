"""Finds the images or texts that belong to the inputs, or decodes the token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ....bench.data import CHANNELS
from ....common.locations import local
from ....data.arrays import npz_array, npz_names
from ....data.batches import Array
from ....errors import FeedError
from ....exporter.model import Model

CONTEXT = 12
"""The number of tokens that are shown before and after an example."""

IMAGES, TEXTS = ("image", "images"), ("text", "texts")
"""Names of the arrays with the images or texts whose features are the inputs."""

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What to show of the inputs: `images` [s, h, w, 3] in bytes, `texts` [s], or `ids` [s, m].

    `decode` turns ids into text; None without a tokenizer. `pixels` are the height and width of
    inputs that are images themselves.
    """

    images: Array | None = field(default=None, repr=False)
    texts: Array | None = field(default=None, repr=False)
    ids: Array | None = field(default=None, repr=False)
    decode: Decode | None = None
    pixels: tuple[int, int] | None = None

    def text(self, number: int) -> str:
        """Returns the text of an input; empty if there is none."""
        return "" if self.texts is None else str(self.texts[number])

    def around(self, number: int, at: int) -> tuple[str, str, str]:
        """Returns the text before a token of an input, its own text, and the text after it."""
        if self.decode is None or self.ids is None:
            return "", "", ""
        ids = self.ids[number].tolist()
        start, end = max(0, at - CONTEXT), at + 1 + CONTEXT
        # A token decoded by itself loses the space before it.
        before, through, text = (self.decode(ids[start:to]) for to in (at, at + 1, end))
        if not (text.startswith(through) and through.startswith(before)):
            return before, self.decode(ids[at : at + 1]), self.decode(ids[at + 1 : end])
        return before, through[len(before) :], text[len(through) :]


def contents_of(inputs: Array, model: Model, data: Any) -> Contents:
    """Returns what to show of a model's inputs, which come from `data`.

    That is the array `image` or `text` next to the inputs, or the inputs if they are images
    themselves; a tokenizer next to the model or the data turns token ids into text. Raises
    `FeedError` for arrays that do not fit.
    """
    path = local(data) if isinstance(data, str | Path) else None
    if np.issubdtype(np.dtype(model.input.dtype), np.integer):
        paths = [local(model.source.path)] + ([] if path is None else [path])
        return Contents(ids=inputs, decode=_decoder(paths))
    arrays = _arrays(data if path is None else path, len(inputs))
    images = next((arrays[name] for name in IMAGES if name in arrays), None)
    texts = next((arrays[name] for name in TEXTS if name in arrays), None)
    pixels = None
    if len(model.input.shape) == 4:
        images = inputs if images is None else images
        channels_last = inputs.shape[3] in CHANNELS and inputs.shape[1] not in CHANNELS
        height, width = inputs.shape[1:3] if channels_last else inputs.shape[2:]
        pixels = (height, width)
    return Contents(
        images=None if images is None else as_bytes(images),
        texts=None if texts is None else texts.astype(str),
        pixels=pixels,
    )


def _arrays(data: Any, count: int) -> dict[str, Array]:
    """Returns the arrays of images and texts; raises `FeedError` for invalid ones."""
    arrays: dict[str, Array] = {}
    if isinstance(data, Mapping):
        arrays = {name: np.asarray(data[name]) for name in (*IMAGES, *TEXTS) if name in data}
    elif isinstance(data, Path) and data.suffix == ".npz":
        names = {*npz_names(data)} & {*IMAGES, *TEXTS}
        arrays = {name: npz_array(data, name) for name in names}
    for name, array in arrays.items():
        fits = array.ndim in (3, 4) if name in IMAGES else array.dtype.kind == "U"
        if len(array) != count or not fits:
            raise FeedError(
                f"array '{name}' is {array.dtype} of shape {array.shape}, for {count} inputs",
                hint="save images as (samples, height, width) or (samples, height, width, 3), and "
                "texts as (samples,)",
            )
    return arrays


def _decoder(paths: Sequence[Path]) -> Decode | None:
    """Returns a decoder for the tokenizer.json in or next to one of the paths; None without one."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    file = next((f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()), None)
    if file is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the reader may raise any exception
        raise FeedError(f"{file}: the tokenizer cannot be read ({error})") from error

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode([int(number) for number in ids], skip_special_tokens=False)
        return text

    return decode


def as_bytes(images: Array) -> Array:
    """Returns images of any usual layout and scale as bytes [s, h, w, 3].

    Bytes stay as they are. Values within 0..1, 0..255 or −1..1 have that scale; others are scaled
    by each channel's smallest and largest value, which undoes a standardisation.
    """
    if images.ndim == 3:
        images = images[..., None]
    elif images.shape[-1] not in CHANNELS:
        images = images.transpose(0, 2, 3, 1)
    if images.shape[-1] not in CHANNELS:
        images = images.mean(axis=-1, keepdims=True)
    if images.dtype != np.uint8:
        smallest, largest = images.min(initial=0), images.max(initial=0)
        if smallest >= 0 and 1 < largest <= 255:
            low, high = np.float32(0), np.float32(255)
        elif smallest >= 0 and largest <= 1:
            low, high = np.float32(0), np.float32(1)
        elif smallest >= -1 and largest <= 1:
            low, high = np.float32(-1), np.float32(1)
        else:
            low, high = images.min(axis=(0, 1, 2)), images.max(axis=(0, 1, 2))
        spread = np.where(high > low, high - low, 1)
        images = ((images - low) / spread * 255).round().clip(0, 255).astype(np.uint8)
    return np.broadcast_to(images, (*images.shape[:3], 3))
