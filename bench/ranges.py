"""The source of INT8 ranges in a benchmark: never the inputs that are scored.

The user gives a table or separate inputs; otherwise a part of the data is excluded from all
measurements. Given inputs that are also measured are recognised by content, not by file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibration.table import CALIBRATION_FILE, CalibrationTable
from ..data.batches import Feed, Fields
from ..data.feeds import FeedHash
from ..exporter.bundle.bundle import Bundle
from ..exporter.checks.accuracy import is_images_or_text
from ..exporter.inputs import feed_batches, fitted_arrays
from ..exporter.model import Model
from .data import Labelled, fingerprint, labelled
from .plan import has_token_routed_layer
from .request import RANGED, BenchRequest

CALIBRATION_INPUTS = 256
"""The largest number of inputs taken from the data for INT8 ranges."""

SHARE = 4
"""At most one in this many inputs of the data is held out."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The source of INT8 ranges, and the inputs to measure.

    `inputs` are observed unless there is a `table`; engines are compiled for their shape. The
    first `held_out` inputs of the data are not in `measured`. `source` is the given file, and
    `text` describes it; both are empty if no ranges are needed.
    """

    inputs: Feed
    measured: Labelled
    table: CalibrationTable | None = None
    held_out: int = 0
    source: str = ""
    text: str = ""

    def record(self) -> dict[str, Any]:
        """Returns the entry for the protocol of the results."""
        kind = "table" if self.table is not None else "feed"
        given = {kind: self.source} if self.source else {}
        return {"text": self.text, "held_out": self.held_out, **given} if self.text else {}


def ranges_of(
    request: BenchRequest,
    model: Model,
    data: Labelled,
    *,
    exports: bool,
    bundles: Sequence[Bundle] = (),
) -> Ranges:
    """Returns the source of INT8 ranges; with `exports`, a model is exported, not only `bundles`.

    Raises `CalibrationError` for an invalid table, `FeedError` for an invalid feed.
    """
    example = data.head(1).feed
    if not exports:
        return Ranges(example, data, text=_bundles_text(bundles, model, data, request.samples))
    # Experts of routed tokens have scales per row.
    if has_token_routed_layer(model) or not {*RANGED} & {*request.precisions}:
        return Ranges(example, data)
    if request.calibration is not None:
        path = Path(request.calibration)
        table = CalibrationTable.read(path)
        sentence = f"the table {path}{_overlap_text(table, model, data, request.samples)}"
        return Ranges(example, data, table, source=str(path), text=sentence)
    if request.calibrate_data is not None:
        return _from_feed(request, model, data)
    if request.data is None:
        head = data.head(CALIBRATION_INPUTS)
        sentence = f"{len(head)} random inputs, which are also measured"
        return Ranges(head.feed, data, text=sentence)
    return _held_out(data)


def _held_out(data: Labelled) -> Ranges:
    """Returns the first inputs of the data, which are not measured unless there are too few."""
    head = data.head(SHARE * CALIBRATION_INPUTS)
    count = min(CALIBRATION_INPUTS, len(head) // SHARE)
    if count == 0:
        sentence = f"the {len(head)} inputs of the data, which are also measured (too few to split)"
        return Ranges(head.feed, data, text=sentence)
    sentence = f"the first {count} inputs of the data, which are excluded from all measurements"
    return Ranges(head.head(count).feed, data.after(count), held_out=count, text=sentence)


def _from_feed(request: BenchRequest, model: Model, data: Labelled) -> Ranges:
    feed = request.calibrate_data
    assert feed is not None, "inputs were given"
    text = str(feed) if isinstance(feed, str | Path) else "the given inputs"
    if is_images_or_text(feed):
        head = labelled(text, model, 1, request.pixels).head(CALIBRATION_INPUTS)
        feed, text = head.feed, f"the first {len(head)} images of {text}"
    given = request.calibrate_data
    source = str(given) if isinstance(given, str | Path) else ""
    known = {*_row_hashes(feed_batches(model, feed))}
    found = [row in known for row in _row_hashes(_batches(model, data, request.samples))]
    share = f", which has {sum(found)} of the {len(found)} inputs that are measured"
    same = ", the inputs that are measured" if all(found) else share if any(found) else ""
    return Ranges(feed, data, source=source, text=text + same)


def _bundles_text(
    bundles: Sequence[Bundle], model: Model, data: Labelled, samples: int | None
) -> str:
    """Describes the tables that quantised bundles were made with; empty if there are none."""
    tables = {
        bundle.path: CalibrationTable.read(bundle.path / CALIBRATION_FILE)
        for bundle in bundles
        if (bundle.path / CALIBRATION_FILE).is_file()
    }
    sentences = (
        f"the table in {path} ({table.origin.samples} inputs)"
        f"{_overlap_text(table, model, data, samples)}"
        for path, table in tables.items()
    )
    return "; ".join(sentences)


def _overlap_text(
    table: CalibrationTable, model: Model, data: Labelled, samples: int | None
) -> str:
    """Describes whether a table was made from the first measured inputs; empty if it was not.

    A table has only the hash of all its inputs, in order.
    """
    feed, count = FeedHash(), table.origin.samples
    for batch in _batches(model, data, count):
        feed.update(*batch.values())
    if feed.samples != count or feed.hexdigest() != table.origin.feed:
        return ""
    measured = data.samples if samples is None else min(samples, data.samples or samples)
    if measured is not None and measured <= count:
        return ", made from the inputs that are measured"
    return f", made from the first {count} of the inputs that are measured"


def _batches(model: Model, data: Labelled, limit: int | None) -> Iterator[Fields]:
    """Yields measured inputs, up to a limit, as a calibration reads them."""
    for inputs, _ in data.stream(CALIBRATION_INPUTS, limit):
        yield fitted_arrays(inputs, model)


def _row_hashes(batches: Iterable[Fields]) -> Iterator[str]:
    """Yields a hash of each input."""
    for batch in batches:
        for rows in zip(*batch.values(), strict=True):
            yield fingerprint(*rows)
