"""Reads tar archives with `tarfile`, and rejects incomplete ones.

`tarfile` mistakes a damaged header in the middle of an archive for its end. Extended headers can
also fill memory, or take quadratic time (before Python 3.11.10), so they are checked first.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, Self

MAX_EXTENDED = 1 << 20
"""The largest size of a long name, or of a member's PAX records."""

RECORDS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENDED = (*RECORDS, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
"""The types of headers that describe the next member or all following members."""

LONG_NUMBER = re.compile(rb"[0-9]{200}")


def tar_files(file: BinaryIO) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields the name and content of each regular file in an open archive.

    Raises `tarfile.TarError`, `ValueError` or `RecursionError` if the archive is incomplete.
    """
    total = file.seek(0, 2)
    file.seek(0)

    class Header(tarfile.TarInfo):
        """A header that is checked before `tarfile` uses it."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
            header = super().frombuf(buf, encoding, errors)
            _check_header(header, file)
            return header

    with tarfile.TarFile(fileobj=file, tarinfo=Header, encoding="utf-8") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it grows with the archive
            if not member.isreg():
                continue
            if not 0 <= member.size <= total - member.offset_data:
                raise tarfile.ReadError(f"truncated: {member.name!r} has {member.size} bytes")
            if (content := archive.extractfile(member)) is not None:
                yield member.name, content
        _check_end(file, archive.offset)


def _check_header(header: tarfile.TarInfo, file: BinaryIO) -> None:
    """Raises ReadError for a header that `tarfile` cannot safely process.

    The position in the file is after the header.
    """
    known = {*tarfile.SUPPORTED_TYPES, *EXTENDED} - {tarfile.GNUTYPE_SPARSE}
    if header.type not in known:
        raise tarfile.ReadError(f"{header.name!r} is of the unsupported type {header.type!r}")
    if header.size < 0 or (header.type in EXTENDED and header.size > MAX_EXTENDED):
        raise tarfile.ReadError(f"a damaged header of {header.size} bytes")
    if header.type in RECORDS:
        start = file.tell()
        _check_records(file.read(header.size))
        file.seek(start)


def _check_records(data: bytes) -> None:
    """Raises ReadError unless the lengths of PAX records are consistent."""
    position = 0
    while position < len(data):
        digits = data[position : position + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[position + len(digits) + 1 : position + length]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or position + length > len(data):
            raise tarfile.ReadError("a damaged header: its records have inconsistent lengths")
        if key.startswith(b"GNU.sparse"):
            raise tarfile.ReadError("a sparse file, which is unsupported")
        position += length
    if LONG_NUMBER.search(data):
        raise tarfile.ReadError("a damaged header: a number in its records is too long")


def _check_end(file: BinaryIO, offset: int) -> None:
    """Raises ReadError unless at least two empty blocks follow, and nothing else."""
    file.seek(offset)
    size, step = 0, 1 << 16
    while data := file.read(step):
        if any(data):
            damaged = size == 0 and any(data[: tarfile.BLOCKSIZE])
            what = "a damaged header" if damaged else "data after the end"
            raise tarfile.ReadError(f"{what} at byte {offset}")
        size += len(data)
    if size < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("truncated: the end of the archive is missing")
