"""Tar archives, read from their beginning to their end: ustar, and the headers of PAX and GNU tar.

Every header is checked by its checksum, every member lies within the file, and behind the two empty
blocks of the end nothing follows. So an archive is whole, or is refused: Python's `tarfile` takes a
damaged header in the middle for the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 512

MOST_EXTENDED = 1 << 20
"""Bytes of a long name, or of a member's PAX records."""

FILES = b"0\x007"
"""The types of plain files."""

SKIPPED = b"123456"
"""Links, devices, folders and pipes."""


class TarDamageError(Exception):
    """What is wrong with an archive, and where."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """A plain file of an archive: its name, and where its bytes lie."""

    name: str
    start: int
    size: int

    def read(self, file: BinaryIO) -> bytes:
        """Returns the bytes of the member of an opened archive."""
        file.seek(self.start)
        data = file.read(self.size)
        if len(data) != self.size:
            raise TarDamageError(f"ends within {self.name}")
        return data


def tar_members(path: Path, file: BinaryIO) -> Iterator[TarMember]:
    """Yields the plain files of an opened archive; `TarDamageError` where it is not whole."""
    total, at = path.stat().st_size, 0
    shared: dict[str, str] = {}
    own: dict[str, str] = {}
    while True:
        file.seek(at)
        header = file.read(BLOCK)
        if len(header) < BLOCK:
            raise TarDamageError("cut short: the end of the archive is missing")
        if not any(header):
            _check_end(file, at)
            return
        kind, name, size = header[156:157], _name(header), _size(header, at)
        if kind in FILES and "size" in own:
            size = _decimal(own["size"], at)
        if kind in SKIPPED:  # they have no bytes, whatever is written there
            size = 0
        start = at + BLOCK
        if size > total - start:
            raise TarDamageError(f"cut short: {name!r} at byte {at} has {size} bytes")
        if kind in b"xgLK":
            if size > MOST_EXTENDED:
                raise TarDamageError(f"a header of {size} bytes at byte {at}")
            (shared if kind == b"g" else own).update(_extended(kind, file.read(size), at))
        elif kind in FILES + SKIPPED:
            every = shared | own
            if any(key.startswith("GNU.sparse") for key in every):
                raise TarDamageError(f"{name!r} is a sparse file, which is not read")
            if kind in FILES:
                yield TarMember(name=every.get("path", name), start=start, size=size)
            own = {}
        else:
            raise TarDamageError(f"{name!r} at byte {at} is of type {kind!r}")
        at = start + -(-size // BLOCK) * BLOCK


def _check_end(file: BinaryIO, at: int) -> None:
    """Behind the first empty block comes another, and nothing that is not empty."""
    blocks, step = 1, bytes(1 << 16)
    while data := file.read(len(step)):
        if data != step[: len(data)]:
            raise TarDamageError(f"an end at byte {at}, but the file goes on behind it")
        blocks += len(data) // BLOCK
    if blocks < 2:
        raise TarDamageError("cut short: half of the end of the archive is missing")


def _name(header: bytes) -> str:
    name = _text(header[:100].partition(b"\0")[0])
    if header[257:263] == b"ustar\0" and header[345]:
        return f"{_text(header[345:500].partition(bytes(1))[0])}/{name}"
    return name


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _size(header: bytes, at: int) -> int:
    """The size in a header whose checksum is right: octal digits, or GNU's binary number."""
    plain = header[:148] + b" " * 8 + header[156:]
    signed = sum(plain) - 256 * sum(byte > 127 for byte in plain)  # as old programs added it up
    if _octal(header[148:156], at) not in (sum(plain), signed):
        raise TarDamageError(f"a damaged header at byte {at}: its checksum is wrong")
    field = header[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return _octal(field, at)


def _octal(field: bytes, at: int) -> int:
    digits = field.partition(b"\0")[0].strip()
    if not all(byte in b"01234567" for byte in digits):
        raise TarDamageError(f"a damaged header at byte {at}: {digits!r} is no size")
    return int(digits or b"0", 8)


def _decimal(digits: str, at: int) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise TarDamageError(f"a damaged header at byte {at}: {digits[:20]!r} is no size")
    return int(digits)


def _extended(kind: bytes, data: bytes, at: int) -> dict[str, str]:
    """What a header says of the next member, or of all: GNU's long name, or the records of PAX."""
    if kind in b"LK":
        return {"path" if kind == b"L" else "linkpath": _text(data.rstrip(b"\0"))}
    return _records(data, at)


def _records(data: bytes, at: int) -> dict[str, str]:
    """The records of a PAX header, each `LENGTH KEY=VALUE` and a line's end."""
    records, place = {}, 0
    while place < len(data):
        digits = data[place : place + 20].partition(b" ")[0]
        length = _decimal(_text(digits), at)
        record = data[place + len(digits) + 1 : place + length]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or place + length > len(data):
            raise TarDamageError(f"a damaged header at byte {at}: its records are none")
        records[_text(key)] = _text(value[:-1])
        place += length
    return records
