"""Reads the footer of a Parquet file: the sizes that its row groups declare, before decoding.

The footer is a message in Thrift's compact protocol. pyarrow can also read it, but a damaged footer
whose statistics do not fit its schema raises a C++ exception that ends the process (pyarrow 26).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAX_LEVELS = 32

HEADER_BYTES = 64 << 10
"""The largest header of a page, which includes the page's smallest and largest value."""

_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}
"""Bytes of a value by Parquet's physical type; the other types are strings of bytes."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Declared sizes of a row group: rows, bytes of values, bytes of the largest text column."""

    rows: int
    value_bytes: int
    text_bytes: int


def row_groups(path: Path) -> Iterator[RowGroup]:
    """Yields the declared sizes of a file's row groups.

    Raises ValueError if the footer is incomplete, or if a page's header declares more than the
    footer.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        length, magic = struct.unpack("<I4s", file.read(8).rjust(8, b"\0"))
        if magic != b"PAR1" or length > size - 8:
            raise ValueError("its footer is missing")
        pages = _Pages(file, size - 8 - length)
        file.seek(pages.end)
        yield from _declared(file.read(length), pages)


def _declared(data: bytes, pages: _Pages) -> Iterator[RowGroup]:
    try:
        footer, rows = _Thrift(data).struct(), 0
        for group in footer.get(4, ()):
            columns = [column[3] for column in group[1]]
            values = sum(column[5] * _WIDTHS.get(column[1], 1) for column in columns)
            sizes = [column[6] for column in columns]
            texts = [column[6] for column in columns if column[1] not in _WIDTHS]
            if min(group[3], *(column[5] for column in columns), *sizes) < 0:
                raise ValueError("its footer declares a negative size")
            rows += group[3]
            yield RowGroup(group[3], max(values, sum(sizes)), max(texts, default=0))
            for column in columns:
                pages.check(column)
        if rows != footer[3]:
            raise ValueError(f"its footer declares {footer[3]} rows, but row groups have {rows}")
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError("its footer is damaged") from error


class _Pages:
    """The pages of a file, which must end before `end`; columns must not share pages."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self.end, self._left = file, end, end

    def check(self, column: dict[int, Any]) -> None:
        """Raises ValueError for pages with more bytes or values than the footer declares."""
        values, unpacked = column[5], column[6]
        offset = min(filter(None, (column[9], column.get(11))))
        while values > 0:
            self._file.seek(offset)
            header = _Thrift(self._file.read(HEADER_BYTES))
            page = header.struct()
            span = header.position + page[3]
            self._left, offset, unpacked = self._left - span, offset + span, unpacked - page[2]
            values -= (page.get(5) or page.get(8) or {1: 0})[1]
            if min(page[2], page[3], self._left, unpacked, values, self.end - offset) < 0:
                raise ValueError("a page declares more than the footer")


class _Thrift:
    """A Thrift message, read up to `position`; structs are dicts by field number."""

    def __init__(self, data: bytes) -> None:
        self._data, self.position = data, 0

    def struct(self, levels: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, levels)
        return fields

    def _value(self, kind: int, levels: int) -> Any:
        if levels > MAX_LEVELS:
            raise ValueError("its footer is nested too deeply")
        match kind:
            case 1 | 2 | 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                return self._bytes(8)
            case 8:
                return self._bytes(self._number())
            case 9 | 10:
                head = self._byte()
                count = self._number() if head >> 4 == 15 else head >> 4
                return [self._value(head & 15, levels + 1) for _ in range(count)]
            case 12:
                return self.struct(levels + 1)
        raise ValueError(f"its footer has a field of type {kind}")

    def _byte(self) -> int:
        self.position += 1
        return self._data[self.position - 1]

    def _bytes(self, count: int) -> bytes:
        self.position += count
        if self.position > len(self._data):
            raise ValueError("its footer is cut short")
        return self._data[self.position - count : self.position]

    def _number(self) -> int:
        number = shift = 0
        while (byte := self._byte()) > 127:
            number, shift = number | (byte & 127) << shift, shift + 7
            if shift > 63:
                raise ValueError("its footer has a number with more than 64 bits")
        return number | byte << shift

    def _signed(self) -> int:
        number = self._number()
        return number >> 1 ^ -(number & 1)
