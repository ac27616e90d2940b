"""Kills commands that write, and runs two at once on one destination; looks what is left.

They are killed at random moments and in each of their phases. A destination is whole or absent, or
what it was before; the next run succeeds and removes what the killed one left. Of two at once each
ends well or says in a sentence why it does not. `make test` does a few; by hand:

    python -m moexport.tests.killing --kills 200 --pairs 50
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime  # noqa: F401  loaded once, for all commands
import torch
from moexport.__main__ import main as main_program
from moexport.bench import results
from moexport.calibration.table import CalibrationTable
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.recorded import DATA
from tqdm import tqdm  # type: ignore[import-untyped]

LAYER = (str(DATA / "soft_moe_fkodom" / "weights.pt"), "--set", "version=0.2.0")
CLASSIFIER = (str(DATA / "soft_moe_mnist" / "weights.pt"), "--set", "normalize=false")
CARD = ("--compute-capability", "8.9")

PHASES = ("os.fsync", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "open")
"""The phases of writing: before any of a command's calls of these below the folder it is killed."""


@dataclass(frozen=True)
class Writer:
    """A command that writes: its arguments, and what says that the destination is whole."""

    arguments: Callable[[Path], Sequence[str | Path]]
    output: str
    check: Callable[[Path], object]
    kept: tuple[str, ...] = ()
    """What a command may leave beside its destination: a journal to go on from."""


def _bundle(path: Path) -> None:
    checks = list(Bundle.open(path).verify())
    assert all(check.passed for check in checks), checks


def _outputs(path: Path) -> None:
    with np.load(path) as arrays:
        assert len(arrays["output"]) == 3, arrays["output"].shape


def _bench(path: Path) -> None:
    if (path / "results.json").exists():
        results.read(path / "results.json")


def _experts(path: Path) -> None:
    if (path / "specialise.json").exists():
        assert json.loads((path / "specialise.json").read_text())["experts"]
    if (path / "specialise.png").exists():
        assert (path / "specialise.png").read_bytes().endswith(b"IEND\xaeB`\x82")


def _page(path: Path) -> None:
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")


WRITERS = {
    "export": Writer(
        lambda d: ("export", *LAYER, "--data", d / "x.npz", "-o", d / "o" / "out", "--force"),
        "out",
        _bundle,
    ),
    "calibrate": Writer(
        lambda d: (
            *("calibrate", *LAYER, "--data", d / "x.npz", "-o", d / "o" / "table.json"),
            "--force",
        ),
        "table.json",
        CalibrationTable.read,
    ),
    "run": Writer(
        lambda d: ("run", d / "b", "-i", d / "x.npz", "-o", d / "o" / "y.npz", "--force"),
        "y.npz",
        _outputs,
    ),
    "report": Writer(
        lambda d: ("report", d / "results.json", "-o", d / "o" / "page.html"),
        "page.html",
        _page,
        ("page.md", "page.csv"),
    ),
    "build": Writer(
        lambda d: ("build", d / "o" / "rtx", "--target", "tensorrt-rtx", *CARD, "--force"),
        "rtx",
        _bundle,
    ),
    "bench": Writer(
        lambda d: (
            *("bench", *LAYER, "-o", d / "o" / "report", "--data", d / "x.npz", "--k", "2"),
            *("--batch", "1", "--engine", "onnxruntime", "--no-memory"),
        ),
        "report",
        _bench,
    ),
    "specialise": Writer(
        lambda d: ("specialise", *CLASSIFIER, "--data", d / "y.npz", "-o", d / "o" / "experts"),
        "experts",
        _experts,
    ),
}


@dataclass
class Tally:
    """What kills of a command came to."""

    kills: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def prepare(folder: Path) -> None:
    """Puts what the commands read into a folder."""
    np.savez(folder / "x.npz", input=np.random.default_rng(0).normal(size=(3, 5, 24)).astype("f4"))
    images = np.random.default_rng(0).random(size=(20, 1, 28, 28)).astype("f4")
    np.savez(folder / "y.npz", input=images, label=np.arange(20) % 10)
    (folder / "o").mkdir()
    (folder / "t").mkdir()
    tempfile.tempdir = str(folder / "t")
    finish(("export", *LAYER, "-o", folder / "b"))
    row = results.Row("pytorch-eager", 2, 2, 1, "digits")
    results.write(
        results.Results((results.ModelInfo("digits", "f", "d.pt", 1),), (row,)),
        folder / "results.json",
    )


def forked(work: Callable[[], object], before_s: float | None = None) -> str | None:
    """Does work in a copy of this process, which has the modules loaded, and says what went wrong.

    None where it was killed: by itself, or here after so many seconds.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        what = ""
        try:
            work()
        except SystemExit as end:
            what = f"exit code {end.code}" if end.code else ""
        except BaseException as error:  # noqa: BLE001  this is another process
            what = f"{type(error).__name__}: {error}"[:2000]
        os.write(write, (what + "\n").encode("utf-8", "replace"))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        if before_s is not None and not select.select([answer], [], [], before_s)[0]:
            os.kill(child, signal.SIGKILL)
        text = answer.read()
    os.waitpid(child, 0)
    return text.strip() if text else None


def command(arguments: Sequence[str | Path], says: str | Path = os.devnull) -> None:
    """Runs the program in this process; what it says goes to a file, or nowhere."""
    output = os.open(says, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["moexport", *map(str, arguments), "-q"]
    main_program()


def finish(arguments: Sequence[str | Path]) -> None:
    """Runs a command to its end; it must succeed."""
    what = forked(lambda: command(arguments))
    assert what == "", f"{arguments[0]}: {what}"


def kill(folder: Path, writer: Writer, after_s: float) -> bool:
    """Starts a command and kills it after so many seconds; whether it was still running."""
    return forked(lambda: command(writer.arguments(folder)), after_s) is None


def calls_of(folder: Path, writer: Writer) -> Counter[str]:
    """Runs a command to its end and counts what it calls of each phase.

    It is run here first: its copies have loaded what it needs, and are killed at their work.
    """
    tqdm.set_lock(threading.RLock())  # its own is of all copies: one that is killed keeps it
    with suppress(SystemExit):
        sys.argv = ["moexport", *map(str, writer.arguments(folder)), "-q"]
        main_program()
    calls: Counter[str] = Counter()
    counts = folder / "calls.json"

    def work() -> None:
        _count(folder, calls.update)
        try:
            command(writer.arguments(folder))
        finally:
            counts.write_text(json.dumps(calls))

    what = forked(work)
    assert what == "", what
    found = Counter(json.loads(counts.read_text()))
    counts.unlink()
    return found


def kill_at(folder: Path, writer: Writer, phase: str, number: int) -> bool:
    """Runs a command that is killed at the n-th call of a phase; whether it came to that."""

    def work() -> None:
        left = number

        def stop(calls: Sequence[str]) -> None:
            nonlocal left
            left -= phase in calls
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        _count(folder, stop)
        command(writer.arguments(folder))

    return forked(work) is None


def _count(folder: Path, call: Callable[[Sequence[str]], object]) -> None:
    """Has this process say each call of a phase below the folder before it is made."""

    def hook(name: str, given: tuple[object, ...]) -> None:
        if name in PHASES and given and str(given[0]).startswith(str(folder / "o")):
            call((name,))

    real = os.fsync

    def fsync(handle: int) -> None:
        call(("os.fsync",))
        real(handle)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)


def look(folder: Path, writer: Writer) -> str:
    """Checks the destination after a kill; says what else was left."""
    place = folder / "o" / writer.output
    if place.exists():
        what = forked(lambda: writer.check(place))
        assert what == "", f"not whole: {what}"
    others = [path.name for path in (folder / "o").iterdir() if path != place]
    return "something" if set(others) - set(writer.kept) else "nothing"


def check_next(folder: Path, writer: Writer) -> None:
    """Runs the command to its end and checks that nothing else is left."""
    finish(writer.arguments(folder))
    place = folder / "o" / writer.output
    assert place.exists()
    assert look(folder, writer) == "nothing"
    left = [path.name for path in (folder / "o").rglob("*") if ".partial" in path.name]
    left += [path.name for path in (folder / "t").glob(".moexport*")]
    assert not left, f"left behind: {left}"


def pair(folder: Path, writer: Writer, later_s: float) -> str:
    """Runs a command twice on one destination, the second so much later; says how they ended.

    One of them succeeds at least; the other does, or is refused in a sentence. What they leave is
    whole.
    """
    says = [folder / "first.txt", folder / "second.txt"]
    children = []
    for number, file in enumerate(says):
        time.sleep(number * later_s)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                command(writer.arguments(folder), file)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    texts = [file.read_text() for file in says]
    for file in says:
        file.unlink()
    assert 0 in codes, f"neither succeeded: {codes}, {texts}"
    for code, text in zip(codes, texts, strict=True):
        assert code in (0, 1, 2), f"ended with {code}: {text}"
        assert "Traceback" not in text, text
        assert code == 0 or text.startswith("error: "), f"ended with {code}: {text}"
    assert (folder / "o" / writer.output).exists()
    assert look(folder, writer) == "nothing"
    return "both succeeded" if not any(codes) else "one was refused"


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description="kill commands that write")
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(WRITERS)}")
    parser.add_argument("--kills", type=int, default=200, help="of each command, at random moments")
    parser.add_argument(
        "--phases", type=int, default=50, help="of each command, in each of its phases"
    )
    parser.add_argument("--pairs", type=int, default=0, help="of each command, two at once")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most, for each command")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    os.environ["MOEXPORT_ENGINE_CACHE"] = "off"
    torch.set_num_threads(1)
    failed = False
    for name in given.names or WRITERS:
        with tempfile.TemporaryDirectory(prefix="kill-") as where:
            tally = _kills(Path(where).resolve(), WRITERS[name], given)
            tempfile.tempdir = None
        failed |= bool(tally.findings)
        what = f"{tally.kills} kills at random moments, {dict(tally.phases)} in phases"
        what += f", left {dict(tally.left)}, pairs {dict(tally.pairs)}"
        print(f"{name}: {what}, {tally.findings}", flush=True)
    sys.exit(failed)


def _kills(folder: Path, writer: Writer, given: argparse.Namespace) -> Tally:
    tally, rng, ends = Tally(), random.Random(given.seed), time.monotonic() + given.seconds
    prepare(folder)
    if writer.output == "rtx":
        target = ("--target", "tensorrt-rtx", "--no-engine")
        finish(("export", *LAYER, "-o", folder / "o" / "rtx", *target))
    calls = calls_of(folder, writer)
    started = time.monotonic()
    finish(writer.arguments(folder))
    whole_s = time.monotonic() - started
    moments = [""] * given.kills
    moments += [phase for phase in PHASES if calls[phase] for _ in range(given.phases)]
    rng.shuffle(moments)
    number = 0
    while moments and time.monotonic() < ends:
        phase = moments.pop()
        if phase:
            hit = kill_at(folder, writer, phase, rng.randint(1, calls[phase]))
            tally.phases[phase] += hit
        else:
            hit = kill(folder, writer, whole_s * rng.uniform(0.1, 1.0))
            tally.kills += hit
        if not hit:  # the command was faster than that
            moments.insert(0, phase)
        number += 1
        try:
            tally.left[look(folder, writer)] += 1
            if number % 10 == 0:
                check_next(folder, writer)
        except Exception as error:  # noqa: BLE001  whatever it is, it is what is looked for
            tally.findings.append(f"kill {number} {phase}: {type(error).__name__}: {error}")
    for number in range(given.pairs):
        try:
            tally.pairs[pair(folder, writer, rng.uniform(0, whole_s) * (number % 2))] += 1
        except AssertionError as error:
            tally.findings.append(f"pair {number}: {error}")
    try:
        check_next(folder, writer)
    except AssertionError as error:
        tally.findings.append(str(error))
    return tally


if __name__ == "__main__":
    main()
