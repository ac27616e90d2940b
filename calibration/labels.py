"""The labels beside the inputs of a feed: a class of each, or the tokens that should follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.user_code import names_code
from ..errors import FeedError
from .arrays import LABEL_NAMES, npz_archive, npz_array, npz_rows
from .feeds import Feed, array_of, batches, imported_items

IGNORED = -1
"""A target token that is not counted."""

Array = NDArray[Any]
Labels = NDArray[np.int64]
LabelledBatch = tuple[Array, Labels | None]
"""Inputs [b, …] and their labels: classes [b], or target tokens [b, m]."""


def labelled_batches(feed: Feed, name: str) -> Iterator[LabelledBatch]:
    """Yields batches [b, …] of the input called `name` with their labels, None where it has none.

    Labels are the array `label`, `labels` or `y` of an `.npz` or of a dict that code yields, and
    the second of a tuple. Raises `FeedError` that names what cannot be read, or cannot be labels.
    """
    if isinstance(feed, str | Path):
        if Path(feed).suffix == ".npz" and Path(feed).is_file():
            yield from _archive(Path(feed), name)
            return
        if not names_code(str(feed)):
            yield from ((x, None) for x in batches(feed, name))
            return
        where, items = str(feed), imported_items(str(feed))
    elif isinstance(feed, np.ndarray):
        yield from ((x, None) for x in batches(feed, name))
        return
    else:
        where, items = "the feed", iter(feed)
    for item in items:
        inputs = array_of(item, name, where)
        yield inputs, _labels_of(item, inputs, where)


def _archive(path: Path, name: str) -> Iterator[LabelledBatch]:
    """The batches of an `.npz`; its labels, a number an input, are read whole."""
    held = npz_archive(path, name)
    labels: Labels | None = None
    if held.label is not None:
        array, header = npz_array(path, held.label), held.header
        where = f"{path}: array '{held.label}'"
        labels = checked_labels(array, header.dtype, header.shape, where, f"'{held.inputs}'")
    start = 0
    for rows in npz_rows(path, name):
        yield rows, None if labels is None else labels[start : start + len(rows)]
        start += len(rows)


def _labels_of(item: object, inputs: Array, where: str) -> Labels | None:
    """The labels of what code yields: the second of a pair, or a dict's `label`."""
    labels: object = None
    if isinstance(item, dict):
        labels = next((item[name] for name in LABEL_NAMES if name in item), None)
    elif isinstance(item, tuple | list) and len(item) > 1:
        labels = item[1]
    if labels is None:
        return None
    array = np.asarray(labels)
    where = f"{where}: a batch's labels"
    return checked_labels(array, inputs.dtype, inputs.shape, where, "the batch")


def checked_labels(
    array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], where: str, inputs_from: str
) -> Labels:
    """Returns the labels of some inputs: classes [b], or for token ids [b, m] target ids [b, m].

    `dtype` and `shape` are the inputs'; `where` and `inputs_from` name both in messages. Raises
    FeedError for what can be neither.
    """
    tokens = dtype.kind in "iu" and array.shape == shape and array.ndim > 1
    if array.ndim != 1 and not tokens:
        raise FeedError(
            f"{where} has shape {array.shape}; labels are one class per sample",
            hint="save labels.ravel()"
            if array.ndim == 2 and array.shape[1] == 1
            else "for one-hot labels save labels.argmax(axis=1)",
        )
    if len(array) != shape[0]:
        raise FeedError(
            f"{where} holds {len(array)} labels for the {shape[0]} samples of {inputs_from}"
        )
    whole = array.dtype.kind in "iu" or (
        array.dtype.kind == "f" and bool((array == np.round(array)).all())
    )
    if not whole:
        raise FeedError(
            f"{where} has dtype {array.dtype} and is not whole numbers",
            hint="labels are class indices counted from 0",
        )
    labels: Labels = array.astype(np.int64)
    if not tokens and labels.size and labels.min() < 0:
        first = int(np.flatnonzero(labels < 0)[0])
        raise FeedError(f"{where} holds the negative label {int(labels[first])} at index {first}")
    return labels


def check_classes(labels: Labels, classes: int, where: str, *, first: int = 0) -> None:
    """Raises FeedError unless every label is a class; `first` is the index of the first one."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        at = int(wrong[0])
        raise FeedError(
            f"{where} holds {wrong.size} labels outside 0..{classes - 1}; "
            f"the first is {int(labels[at])} at index {first + at}",
            hint=f"the model has {classes} classes, counted from 0",
        )
