"""Damages files at random, and tells what a reader of them did about it.

A reader may take a damaged file or refuse it with a `MoexportError`; anything else is a finding: a
traceback, more than `LIMIT_S` seconds or `LIMIT_BYTES` of memory, the end of the process. The same
seed gives the same files. `fuzz` runs in this process, for a test; the program runs in processes of
their own, for as long as it is told, and survives what they do not:

    python -m moexport.tests.fuzzing checkpoints --seconds 600
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moexport.errors import MoexportError

LIMIT_S = 5.0
LIMIT_BYTES = 1 << 30

KINDS = {"checkpoints": "moexport.tests.exporter.checkpoints.test_fuzz"}
"""Kinds of file, and the modules whose `SUBJECT` says how they are made and read."""


@dataclass(frozen=True)
class Subject:
    """A kind of file: `seeds` writes whole ones into a folder and `read` takes a path.

    `read` raises `MoexportError` for what it refuses. Beside each path are the files that belong
    to it, of which one is damaged.
    """

    seeds: Callable[[Path], list[Path]]
    read: Callable[[Path], object]


@dataclass(frozen=True)
class Finding:
    """What went wrong, and with which file: `number` of `seed`."""

    seed: int
    number: int
    file: str
    what: str


# --- mutations ---------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Returns the bytes with one to eight changes of the kinds that files suffer or are given."""
    changes = (_flip, _flip, _overwrite, _cut, _delete, _repeat, _insert, _number, _digits)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        data = rng.choice(changes)(data, rng) or b"\0"
    return data


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + int(2 ** rng.uniform(0, 10)))


def _flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    fill = rng.choice((b"\0", b"\xff", None))
    new = rng.randbytes(end - start) if fill is None else fill * (end - start)
    return data[:start] + new + data[end:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _delete(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    place = rng.randrange(len(data))
    return data[:place] + data[start:end] * rng.choice((1, 2, 16)) + data[place:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + rng.randbytes(rng.randrange(1, 16)) + data[place:]


def _number(data: bytes, rng: random.Random) -> bytes:
    form = rng.choice(("<B", "<H", "<I", "<Q"))
    size = struct.calcsize(form)
    packed = struct.pack(form, rng.choice(NUMBERS) % 256**size)
    place = rng.randrange(len(data))
    return data[:place] + packed + data[place + size :]


def _digits(data: bytes, rng: random.Random) -> bytes:
    """One number that is written out becomes another, as JSON, keys and headers hold them."""
    places = [i for i, byte in enumerate(data[:65536]) if 48 <= byte <= 57]
    if not places:
        return data
    start = end = rng.choice(places)
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    new = rng.choice(("0", "-1", "1", "7", "1000000", "9" * 23, "1e400", "[" * 5000, "null"))
    return data[:start] + new.encode() + data[end:]


def mutated_archive(data: bytes, rng: random.Random) -> bytes:
    """Returns a zip archive one of whose members was changed, its checksums right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    # Most of the sense is in the small ones: pickles and headers.
    names = sorted(members, key=lambda name: len(members[name]))
    name = names[min(int(rng.expovariate(0.7)), len(names) - 1)] if rng.random() < 0.5 else None
    name = name or next((n for n in names if n.endswith("data.pkl")), rng.choice(names))
    members[name] = mutated(members[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as new:
        for member, content in members.items():
            new.writestr(member, content)
    return out.getvalue()


def mutated_header(data: bytes, rng: random.Random) -> bytes:
    """Returns a file that begins with a length and so many bytes of header, the header changed."""
    (length,) = struct.unpack("<Q", data[:8])
    header = mutated(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def damaged(file: Path, data: bytes, rng: random.Random) -> bytes:
    """Returns what is in a file, changed with or without an eye to its format."""
    if rng.random() < 0.7:
        if data[:4] == b"PK\x03\x04":
            return mutated_archive(data, rng)
        if file.suffix == ".safetensors":
            return mutated_header(data, rng)
    return mutated(data, rng)


# --- runs --------------------------------------------------------------------------------------


def fuzz(subject: Subject, folder: Path, seed: int, numbers: range) -> Iterator[Finding | None]:
    """Yields what each file of a seed did; None where it was taken or refused as it should be."""
    originals = [
        (path, {file: file.read_bytes() for file in path.parent.iterdir()})
        for path in subject.seeds(folder)
    ]
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        path, files = originals[number % len(originals)]
        file = rng.choice(list(files))
        file.write_bytes(damaged(file, files[file], rng))
        what = attempt(subject.read, path)
        yield None if what is None else Finding(seed, number, path.parent.name, what)
        file.unlink()
        file.write_bytes(files[file])


def attempt(read: Callable[[Path], object], path: Path) -> str | None:
    """Reads one file and returns what was wrong with that; None where nothing was."""
    started, before = time.monotonic(), _peak_bytes()
    try:
        read(path)
    except MoexportError as error:
        if not error.message.strip():
            return "an error without a message"
    except Exception:  # noqa: BLE001  whatever it is, it is what is looked for
        return traceback.format_exc()
    took, grew = time.monotonic() - started, _peak_bytes() - before
    if took > LIMIT_S:
        return f"took {took:.1f} s"
    return f"took {grew >> 20} MiB" if grew > LIMIT_BYTES else None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _worker(kind: str, seed: int, count: int) -> None:
    subject: Subject = importlib.import_module(KINDS[kind]).SUBJECT
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for number, finding in enumerate(fuzz(subject, Path(folder), seed, range(count))):
            print(json.dumps([number, None if finding is None else finding.what]), flush=True)


def _batch(kind: str, seed: int, count: int) -> tuple[int, list[Finding]]:
    """How many files of a seed a process of its own read, and what was found."""
    command = [sys.executable, "-m", __spec__.name, kind, "--worker", str(seed), str(count)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=60 + LIMIT_S * 10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
    done = [json.loads(line) for line in out.splitlines()]
    found = [Finding(seed, number, kind, what) for number, what in done if what is not None]
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or [""]
        how = f"the process ended with {process.returncode}: {last[0]}"
        found.append(Finding(seed, len(done), kind, how))
    return len(done), found


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description="damage files at random and read them")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _worker(given.kind, *given.worker)
        return
    ends, total, seed = time.monotonic() + given.seconds, 0, given.seed
    found: list[Finding] = []
    while time.monotonic() < ends:
        read, findings = _batch(given.kind, seed, 500)
        total, seed = total + read, seed + 1
        found += findings
        for finding in findings:
            print(f"seed {finding.seed} file {finding.number}: {finding.what}", flush=True)
    print(f"{given.kind}: {total} files from seed {given.seed}, {len(found)} findings")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
