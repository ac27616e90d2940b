"""`calibration.json`: the ranges that a model's tensors take, and what they were taken from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

from ..common.documents import from_data, object_in, read_document
from ..common.writing import write_text
from ..errors import CalibrationError
from ..graphs.precision.types import Range
from ..graphs.targets import Method

CALIBRATION_FILE = "calibration.json"
SCHEMA = 1

METHODS: tuple[Method, ...] = get_args(Method)

_WRITES = "`moexport calibrate MODEL --data FEED -o table.json` writes one"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a table was made from and how: two tables of one origin are the same table.

    `model` is a hash of the weights and the configuration, `feed` of the inputs in their order,
    whatever file or batch size they came in. `k` is each layer's number of kept experts; the rows
    that other experts would get were not observed. `percentile` is None for the other methods.
    """

    model: str
    feed: str
    samples: int
    k: Mapping[str, int]
    method: Method
    percentile: float | None = None
    renormalize: bool = False


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """Ranges by tensor (`names.range_key`), and the largest absolute values of the others.

    `peaks` holds max|x| of every float value of the backbone by its name in the traced graph, and
    of the values inside MoE layers that are no input of a matrix product: what a 16-bit float must
    hold without overflow. `moexport` is the version that wrote the table.
    """

    origin: Origin
    ranges: Mapping[str, Range]
    peaks: Mapping[str, float] = field(default_factory=dict)
    moexport: str = ""

    def range(self, key: str) -> Range:
        """Returns the range of one tensor; `CalibrationError` where it was never seen."""
        if key not in self.ranges:
            raise CalibrationError(
                f"{key}: the calibration table holds no range of this tensor",
                hint="calibrate this model again: `moexport calibrate MODEL --data FEED`",
            )
        return self.ranges[key]

    def write(self, path: Path) -> None:
        """Writes the table as JSON, whole or not at all; `OutputError` where it cannot be."""
        write_text(self.to_json(), path)

    def to_json(self) -> str:
        """The table as indented JSON, `schema` first."""
        content = {"schema": SCHEMA, "moexport": self.moexport, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def read(path: Path) -> CalibrationTable:
        """Reads a table; `CalibrationError` when there is none or it is not a whole one."""
        refused = partial(CalibrationError, hint=_WRITES)
        try:
            content = read_document(path, "json", refused)
        except FileNotFoundError as error:
            raise refused(f"{path}: no such calibration table") from error
        except OSError as error:
            raise refused(f"{path}: cannot be read ({error})") from error
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise CalibrationError(
                f"{path}: schema {schema!r}, but this version reads schema {SCHEMA}",
                hint="calibrate again with this version of moexport",
            )
        what = f"{path}: not a whole calibration table"
        table = from_data(CalibrationTable, content, what, error=refused)
        _check(path, table)
        return table


def is_table(path: Path) -> bool:
    """Whether a file is a calibration table of any version, as far as its keys tell."""
    return {"schema", "moexport", "ranges"} <= object_in(path).keys()


def _check(path: Path, table: CalibrationTable) -> None:
    """A table that was edited by hand must still be one."""
    for key, r in table.ranges.items():
        numbers = (r.low, r.high, r.minimum, r.maximum)
        if not all(math.isfinite(number) for number in numbers) or r.low > r.high:
            raise CalibrationError(
                f"{path}: {key} has the range {r.low} to {r.high}, which is none",
                hint="calibrate again",
            )
