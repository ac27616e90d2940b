"""Damages files at random, and tells what a reader of them did about it.

A reader may take a damaged file or refuse it with a `MoexportError`; anything else is a finding: a
traceback, more than `LIMIT_S` seconds or `LIMIT_BYTES` of memory, the end of the process. The same
seed gives the same files. `fuzz` runs in this process, for a test; the program runs in processes of
their own, for as long as it is told, and survives what they do not:

    python -m moexport.tests.hard.fuzzing checkpoints tables --seconds 600
"""

from __future__ import annotations

import argparse
import copy
import importlib
import io
import json
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from moexport.errors import MoexportError

LIMIT_S = 5.0
"""Of the processor's time, so that a busy machine finds nothing."""

STALLED_S = 120.0
LIMIT_BYTES = 1 << 30

KILLED_BYTES = 8 << 30
"""Of its own processes, so that none takes the machine with it."""

KINDS = {
    "checkpoints": "moexport.tests.hard.test_damaged_checkpoints:SUBJECT",
    "jax": "moexport.tests.hard.test_damaged_checkpoints:JAX",
} | {
    kind: f"moexport.tests.hard.test_fuzz:{kind.upper()}"
    for kind in (
        *("bundles", "manifests", "graphs", "references", "tables", "results", "rewrites"),
        *(
            "reports",
            "configs",
            "feeds",
            "plans",
            "shards",
            "recipes",
            "transformers",
            "served",
            "images",
        ),
    )
}
"""Kinds of file, and the module and name of the `Subject` that says how they are made and read."""


@dataclass(frozen=True)
class Subject:
    """A kind of file: `seeds` writes whole ones into a folder and `read` takes a path.

    `read` raises `MoexportError` for what it refuses. Beside each path are the files that belong
    to it, of which one is damaged: any, or one of `files`.
    """

    seeds: Callable[[Path], list[Path]]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ()


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
    if name.endswith(".npy") and rng.random() < 0.5:
        members[name] = mutated_array(members[name], rng)
    else:
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


DEEP = 100_000
"""How deep nested lists may be in what nobody meant well."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -1e308, float("nan"), float("inf")),
    *("", "text", "a" * 5000, "../x", "/etc/passwd", "\x1b[31m", "\ud800", "input", "NaN"),
    *([], {}, [1], [[]], {"a": 1}, [None], [0.5] * 40, "0", -(2**63)),
)
"""What a field of JSON may hold instead of what it should."""


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """Returns a JSON text some of whose values are others, are gone, or are there twice."""
    content = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        holders = [each for each in _holders(content) if each]
        if not holders:
            break
        # The deepest records are many: those above matter as much.
        holder = rng.choice(holders[: rng.choice((2, 8, len(holders)))])
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match rng.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 1:
                holder[rng.choice(("", "x", "\n", f"{key} "))] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(content)
    if rng.random() < 0.02:
        text = text.replace("null", "[" * DEEP + "]" * DEEP, 1)
    return text.encode("utf-8", "surrogatepass")


def _holders(content: Any) -> list[Any]:
    """Every object and list in plain data, outer ones first."""
    found = [content] if isinstance(content, dict | list) else []
    for each in found:
        inner = each.values() if isinstance(each, dict) else each
        found += [value for value in inner if isinstance(value, dict | list)]
    return found


def mutated_graph(data: bytes, rng: random.Random) -> bytes:
    """Returns an ONNX graph some of whose fields are others, are gone, or are there twice."""
    model = onnx.load_model_from_string(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        message: Message = model
        while True:
            held = [(field, value) for field, value in message.ListFields()]
            if not held:
                break
            field, value = rng.choice(held)
            inner = list(value) if field.is_repeated else [value]
            is_message = field.type == FieldDescriptor.TYPE_MESSAGE
            if is_message and rng.random() < 0.85:
                message = rng.choice(inner)
                continue
            _change_field(message, field, value, rng)
            break
    return bytes(model.SerializeToString())


def _change_field(message: Message, field: Any, value: Any, rng: random.Random) -> None:
    if not field.is_repeated:
        new = _field_value(field, rng)
        if new is None or rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, new)
        return
    place = rng.randrange(len(value))
    match rng.randrange(4):
        case 0:
            del value[place]
        case 1:
            value.append(value[rng.randrange(len(value))])
        case 2 if (new := _field_value(field, rng)) is not None:
            value[place] = new
        case _ if rng.random() < 0.3:
            message.ClearField(field.name)
        case _:
            order = list(value)
            rng.shuffle(order)
            del value[:]
            value.extend(order)


def _field_value(field: Any, rng: random.Random) -> Any:
    """Another value for a field of a protobuf message; None for a message."""
    if field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_INT32):
        most = 2 ** (63 if field.type == FieldDescriptor.TYPE_INT64 else 31)
        return rng.choice((0, 1, 2, 3, 5, 7, 10, 16, -1, -most, most - 1, 2**30))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(("", "x", "input", "output", "k", "../x", "weights.bin", "-1", "[" * 999))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 8, 64)))
    return None


def mutated_array(data: bytes, rng: random.Random) -> bytes:
    """Returns an `.npy` file whose header is another, its length right."""
    (length,) = struct.unpack("<H", data[8:10])
    header = data[10 : 10 + length].strip()
    if rng.random() < 0.5:
        pieces = (b"<f4", b"False", b"(", b")", b"descr", b"shape", b",", b"'", b"fortran")
        new = (
            b"True",
            b"|O",
            b"<U0",
            b">f8",
            b"<M8[s]",
            b"-1, ",
            b"(" * 500,
            b"9" * 30,
            b"",
            b"|V9",
        )
        header = header.replace(rng.choice(pieces), rng.choice(new), 1)
    else:
        header = mutated(header, rng)
    header = header[:60_000] + b"\n"
    return data[:8] + struct.pack("<H", len(header)) + header + data[10 + length :]


TEXTS = (
    *("&a ", "*a", "<<: ", "<<: *a\n", "!!int ", "!!int ''", "!!binary ", "!!set {", "? [1] : 2"),
    *(
        "[" * 3000,
        "{a: " * 200,
        "a." * 5000,
        "[a.b]\n",
        "[[a]]\n",
        "\n- ",
        ": ",
        "59:" * 5000,
        "|\n",
    ),
    *("9" * 400, "0x" + "f" * 500, "1e999", "2030-02-31", "9999-12-31T23:59:60Z", "\t", "\0", "'"),
    *("\u2028", '"""', "= {", "%YAML 9.9\n---\n", "---\n", ".inf", "~", "~: ~", "true", "-1"),
)
"""What YAML and TOML have that a reader may stumble over."""


def mutated_text(data: bytes, rng: random.Random) -> bytes:
    """Returns a text of YAML or TOML some of whose words are others, or stand elsewhere."""
    words = re.split(r"(\W)", data.decode())
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(words))
        match rng.randrange(4):
            case 0:
                words[place] = rng.choice(words)
            case 1:
                words.insert(place, rng.choice(TEXTS))
            case 2:
                words[place:place] = words[place : place + rng.randrange(40)] * rng.choice((1, 9))
            case _:
                words[place] = rng.choice(TEXTS)
    return "".join(words).encode()


def mutated_tar(data: bytes, rng: random.Random) -> bytes:
    """Returns a tar one of whose headers is another, its checksum right in most."""
    headers = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(headers)
    block = bytearray(data[at : at + 512])
    start, end = rng.choice(((0, 100), (124, 136), (156, 157), (257, 265), (345, 500)))
    new = rng.choice(
        (
            *(b"\xff" * 12, b"\x80" + b"\xff" * 11, b"-1", b"77777777777", b"0", b"\0" * 12),
            *(b"x", b"g", b"L", b"K", b"S", b"5", b"2", b"7", rng.randbytes(end - start)),
        )
    )
    block[start:end] = new[: end - start].ljust(end - start, b"\0")
    if rng.random() < 0.9:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    body = rng.choice((b"", b"19 size=9999999999\n", b"13 path=a.b\n", b"9" * 500, b"0 a=b\n"))
    rest = data[at + 512 :]
    rest = body + rest[len(body) :] if rng.random() < 0.3 else rest
    return data[:at] + bytes(block) + rest


MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": mutated_json,
    ".onnx": mutated_graph,
    ".npy": mutated_array,
    ".yaml": mutated_text,
    ".toml": mutated_text,
    ".tar": mutated_tar,
    ".safetensors": mutated_header,
}


def damaged(file: Path, data: bytes, rng: random.Random) -> bytes:
    """Returns what is in a file, changed with or without an eye to its format."""
    archive = data[:4] == b"PK\x03\x04"
    change = mutated_archive if archive else MUTATIONS.get(file.suffix, mutated)
    return change(data, rng) if rng.random() < 0.7 else mutated(data, rng)


# --- runs --------------------------------------------------------------------------------------


def fuzz(subject: Subject, folder: Path, seed: int, numbers: range) -> Iterator[Finding | None]:
    """Yields what each file of a seed did; None where it was taken or refused as it should be."""
    yield from read_damaged(subject, subject.seeds(folder), seed, numbers)


def read_damaged(
    subject: Subject, paths: Iterable[Path], seed: int, numbers: range
) -> Iterator[Finding | None]:
    """Damages the files beside these paths, one at a time, and puts each back (`fuzz`)."""
    originals = [
        (
            path,
            {
                file: file.read_bytes()
                for file in sorted(path.parent.iterdir())
                if file.is_file() and (not subject.files or file.name in subject.files)
            },
        )
        for path in paths
    ]
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        path, files = originals[number % len(originals)]
        file = rng.choice(list(files))
        file.write_bytes(damaged(file, files[file], rng))
        what = attempt(subject.read, path)
        yield (
            None if what is None else Finding(seed, number, f"{path.parent.name}/{file.name}", what)
        )
        file.unlink()
        file.write_bytes(files[file])


def attempt(read: Callable[[Path], object], path: Path) -> str | None:
    """Reads one file and returns what was wrong with that; None where nothing was."""
    started, before = time.process_time(), _peak_bytes()
    try:
        read(path)
    except MoexportError as error:
        if not error.message.strip():
            return "an error without a message"
    except Exception:  # noqa: BLE001  whatever it is, it is what is looked for
        return traceback.format_exc()
    took, grew = time.process_time() - started, _peak_bytes() - before
    if took > LIMIT_S:
        return f"took {took:.1f} s"
    return f"took {grew >> 20} MiB" if grew > LIMIT_BYTES else None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def subject_of(kind: str) -> Subject:
    """Returns how files of a kind are made and read."""
    module, _, name = KINDS[kind].partition(":")
    # No instance of this file's class, where this file is the program.
    found: Subject = getattr(importlib.import_module(module), name)
    return found


def _worker(kind: str, seed: int, count: int, seeds: Path) -> None:
    subject = subject_of(kind)
    resource.setrlimit(resource.RLIMIT_DATA, (KILLED_BYTES, KILLED_BYTES))
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=seeds.parent) as name:
        folder = Path(shutil.copytree(seeds, Path(name) / "seeds"))
        paths = [folder / each for each in json.loads((folder / "paths.json").read_text())]
        for number, finding in enumerate(read_damaged(subject, paths, seed, range(count))):
            print(json.dumps([number, None if finding is None else finding.what]), flush=True)


def _batch(kind: str, seed: int, count: int, seeds: Path, ends: float) -> tuple[int, list[Finding]]:
    """How many files of a seed a process of its own read by a time, and what was found."""
    command = [sys.executable, "-m", __spec__.name, kind]
    command += ["--worker", str(seed), str(count), str(seeds)]
    done: list[tuple[int, str | None]] = []
    over = False
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        stalled = threading.Timer(STALLED_S, process.kill)
        assert process.stdout is not None
        stalled.start()
        for line in process.stdout:
            stalled.cancel()
            if line.startswith("["):
                done.append(json.loads(line))
            if time.monotonic() > ends:
                over = True
                process.kill()
                break
            stalled = threading.Timer(STALLED_S, process.kill)
            stalled.start()
        stalled.cancel()
    found = [Finding(seed, number, kind, what) for number, what in done if what is not None]
    if process.returncode and not over:
        how = f"the process ended with {process.returncode}, or {STALLED_S:.0f} s went by"
        found.append(Finding(seed, len(done), kind, how))
    return len(done), found


def _run(kind: str, seed: int, seconds: float, most: int) -> int:
    """Reads damaged files of a kind for so long, or so many; returns how many findings it made."""
    started, total, findings, each = time.monotonic(), 0, 0, seed
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "seeds"
        folder.mkdir()
        paths = [str(path.relative_to(folder)) for path in subject_of(kind).seeds(folder)]
        (folder / "paths.json").write_text(json.dumps(paths))
        while time.monotonic() - started < seconds and total < most:
            read, found = _batch(kind, each, 500, folder, started + seconds)
            total, each, findings = total + max(read, 1), each + 1, findings + len(found)
            for finding in found:
                print(f"{kind}, seed {finding.seed}, file {finding.number}: {finding.what}")
            print(f"{kind}: {total} files from seed {seed}, {findings} findings", flush=True)
    return findings


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description="damage files at random and read them")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; all without any")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind")
    parser.add_argument("--most", type=int, default=1 << 30, help="files of each kind")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        seed, count, seeds = given.worker
        _worker(given.kinds[0], int(seed), int(count), Path(seeds))
        return
    kinds = given.kinds or list(KINDS)
    findings = [_run(kind, given.seed, given.seconds, given.most) for kind in kinds]
    sys.exit(1 if any(findings) else 0)


if __name__ == "__main__":
    main()
