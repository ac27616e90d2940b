"""`calibration.json`: the ranges of a model's tensors, and their origin."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import get_args

from ..common.documents import from_data, object_in, read_document
from ..common.locations import no_such_table
from ..common.writing import check_file, write_text
from ..errors import CalibrationError
from ..graphs.precision.types import Range
from ..graphs.targets import Method

CALIBRATION_FILE = "calibration.json"
SCHEMA = 1

METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a table: tables of the same origin are equal.

    `model` is a hash of the weights and the configuration, `feed` of the inputs in their order,
    whatever their file or batch size. `k` is the number of kept experts of each layer; rows of
    other experts were not observed. `percentile` is None for methods other than `percentile`.
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

    `peaks` has max|x| of every float value of the backbone by its name in the traced graph, and
    of the values inside MoE layers that do not enter a matrix product: a 16-bit float must
    represent them without overflow. `moexport` is the version that wrote the table.
    """

    origin: Origin
    ranges: Mapping[str, Range]
    peaks: Mapping[str, float] = field(default_factory=dict)
    moexport: str = ""

    def range(self, key: str) -> Range:
        """Returns the range of one tensor; raises `CalibrationError` if there is none."""
        if key not in self.ranges:
            raise CalibrationError(
                f"{key}: the calibration table has no range for this tensor",
                hint="calibrate this model again: `moexport calibrate MODEL --data FEED`",
            )
        return self.ranges[key]

    def write(self, path: Path) -> None:
        """Writes the table as JSON, completely or not at all; raises `OutputError` on failure."""
        write_text(self.to_json(), path)

    def to_json(self) -> str:
        """Returns the table as indented JSON, with `schema` first."""
        content = {"schema": SCHEMA, "moexport": self.moexport, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def read(path: Path) -> CalibrationTable:
        """Reads a table; raises `CalibrationError` if it is missing or invalid."""
        advice = "`moexport calibrate MODEL --data FEED -o table.json` writes one"
        refused = partial(CalibrationError, hint=advice)
        try:
            content = read_document(path, "json", refused)
        except FileNotFoundError as error:
            raise no_such_table(path) from error
        except OSError as error:
            raise refused(f"{path}: cannot be read ({error})") from error
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise CalibrationError(
                f"{path}: schema {schema!r}, but this version reads schema {SCHEMA}",
                hint="calibrate again with this version of moexport",
            )
        what = f"{path}: not a complete calibration table"
        table = from_data(CalibrationTable, content, what, error=refused)
        _check(path, table)
        return table


def is_table(path: Path) -> bool:
    """Returns whether a file is a calibration table of any version, judging by its keys."""
    return {"schema", "moexport", "ranges"} <= object_in(path).keys()


def check_table_path(path: Path) -> None:
    """Raises `CalibrationError` if another file is there, `OutputError` if it is not writable."""
    check_file(path)
    if path.exists() and not is_table(path):
        raise CalibrationError(
            f"{path}: the file exists but is not a calibration table; it is left untouched",
            hint="choose another -o",
        )


def _check(path: Path, table: CalibrationTable) -> None:
    """Validates a table, which may have been edited by hand."""
    for key, r in table.ranges.items():
        numbers = (r.low, r.high, r.minimum, r.maximum)
        if not all(math.isfinite(number) for number in numbers) or r.low > r.high:
            raise CalibrationError(
                f"{path}: {key} has the invalid range {r.low} to {r.high}", hint="calibrate again"
            )
