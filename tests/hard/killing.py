"""Kills commands that write, and runs two at once on one destination; looks what is left.

They are killed at random moments and in each of their phases. A destination is whole or absent, or
what it was before; the next run succeeds, and a day later removes what the killed one left. Of two
at once each ends well or says in a sentence why it does not. `make test` does a few; by hand:

    python -m moexport.tests.hard.killing --kills 200 --pairs 50
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import shutil
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
import onnxruntime
import torch
from moexport.__main__ import main as main_program
from moexport.bench import results
from moexport.calibration.table import CalibrationTable
from moexport.exporter.bundle.bundle import Bundle
from moexport.plugins.demo.demo import save_data
from moexport.plugins.demo.digits import Training, load_digits, save, train
from moexport.tests.recorded import DATA
from tqdm import tqdm  # type: ignore[import-untyped]

LAYER = (str(DATA / "soft_moe_fkodom" / "weights.pt"), "--set", "version=0.2.0")
CLASSIFIER = (str(DATA / "soft_moe_mnist" / "weights.pt"), "--set", "normalize=false")
CARD = ("--compute-capability", "8.9")

PHASES = ("os.fsync", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "open")
"""The phases of writing: before any of a command's calls of these below the folder it is killed."""


LIBRARIES = ("matplotlib", "torchinductor_root")
"""What libraries keep in the folder for temporary files from one run to the next."""


@dataclass(frozen=True)
class Writer:
    """A command that writes: its arguments, and what says that the destination is whole."""

    arguments: Callable[[Path], Sequence[str | Path]]
    output: str
    check: Callable[[Path], object]
    kept: tuple[str, ...] = ()
    """What a command may leave beside its destination: a journal to go on from."""
    before: Callable[[Path], object] = lambda folder: None
    """Makes what this command alone reads."""
    anew: bool = False
    """That the next begins with nothing after a run to the end: it would have nothing to do."""
    slow: bool = False
    """That it is stopped at moments of one run, and what a kill there would leave is copied."""


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


def _repository(path: Path) -> None:
    """Every model of a Triton repository has its configuration and all the files of its version."""
    models = [each for each in path.iterdir() if not each.name.startswith(".")]
    assert models or list(path.glob(".*.old")), "no model, and none that was being replaced"
    for model in models:
        told = (model / "config.pbtxt").read_text()
        assert told and told.count("{") == told.count("}"), told
        onnxruntime.InferenceSession(model / "1" / "model.onnx" / "model.onnx")


def _demo(path: Path) -> None:
    for file in path.rglob("*"):
        if any(part.startswith(".") for part in file.relative_to(path).parts):
            continue  # still being written
        match file.name:
            case "manifest.json":
                _bundle(file.parent)
            case "results.json":
                results.read(file)
            case "report.html":
                _page(file)
            case name if name.endswith(".npz"):
                with np.load(file) as arrays:
                    assert all(arrays[name].size for name in arrays.files)
            case name if name.endswith(".pt"):
                torch.load(file, weights_only=True)


def _for_engines(folder: Path) -> None:
    target = ("--target", "tensorrt-rtx", "--no-engine")
    finish(("export", *LAYER, "-o", folder / "o" / "rtx", *target))


def _trained(folder: Path) -> None:
    """A network and inputs of which a search has something to find."""
    digits = load_digits(test_share=0.5)
    save(
        train(Training(8, hidden=8, scale=16.0, epochs=2, batch=64), digits.train), folder / "n.pt"
    )
    save_data(digits.test, folder / "n.npz")


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
        before=_for_engines,
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
    "triton": Writer(
        lambda d: ("triton", d / "b", "-o", d / "o" / "models", "--force"), "models", _repository
    ),
    "tune": Writer(
        lambda d: (
            *("tune", d / "n.pt", "--data", d / "n.npz", "-o", d / "o" / "out", "--threads", "1"),
            *("--keep", "80%", "--precision", "fp32", "--batch", "1", "--time", "4s", "--force"),
        ),
        "out",
        _bundle,
        ("out-report",),
        _trained,
        anew=True,
    ),
    "demo": Writer(lambda d: ("demo", "-o", d / "o" / "demo", "--force"), "demo", _demo, slow=True),
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
    places = (str(folder / "o"), str(folder / "t"))

    def hook(name: str, given: tuple[object, ...]) -> None:
        if name in PHASES and given and str(given[0]).startswith(places):
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
    """Runs the command to its end, a day later, and checks that nothing else is left."""
    for place in (folder / "o", folder / "t"):
        for path in place.rglob("*"):
            if any(part.startswith(".") for part in path.relative_to(place).parts):
                os.utime(path, (0, 0))
    finish(writer.arguments(folder))
    place = folder / "o" / writer.output
    assert place.exists()
    assert look(folder, writer) == "nothing"
    left = [path.name for path in (folder / "o").rglob("*") if ".partial" in path.name]
    left += [path.name for path in (folder / "t").iterdir() if path.name not in LIBRARIES]
    assert not left, f"left behind: {left}"


def empty(folder: Path) -> None:
    """Removes what the command wrote."""
    shutil.rmtree(folder / "o")
    (folder / "o").mkdir()


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


def look_on_the_way(
    folder: Path,
    writer: Writer,
    given: argparse.Namespace,
    tally: Tally,
    calls: Counter[str],
    whole_s: float,
) -> None:
    """Stops one run at random moments and in its phases, and looks at a copy of what is there.

    That is what a kill at that moment would leave, and one long run has hundreds of such moments.
    """
    rng = random.Random(given.seed)
    wanted = {
        phase: set(rng.sample(range(calls[phase]), min(given.phases, calls[phase])))
        for phase in PHASES
    }
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen: Counter[str] = Counter()

        def stop(called: Sequence[str]) -> None:
            for phase in called:
                if seen[phase] in wanted[phase]:
                    os.write(write, bytes([PHASES.index(phase)]))
                    os.kill(os.getpid(), signal.SIGSTOP)
                seen[phase] += 1

        _count(folder, stop)
        command(writer.arguments(folder))
        os._exit(0)
    os.set_blocking(read, False)
    while True:
        moment = time.monotonic() + rng.expovariate(given.kills / whole_s)
        changed, status = 0, 0
        while time.monotonic() < moment and not changed:
            time.sleep(0.001)
            changed, status = os.waitpid(child, os.WUNTRACED | os.WNOHANG)
        if not changed:
            os.kill(child, signal.SIGSTOP)
            status = os.waitpid(child, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            assert status == 0, f"ended with {status}"
            return
        try:
            phase = PHASES[os.read(read, 1)[0]]
        except BlockingIOError:
            phase = ""
        with tempfile.TemporaryDirectory(prefix="kill-") as place:
            copy = Path(place).resolve()
            shutil.copytree(folder / "o", copy / "o")
            try:
                tally.left[look(copy, writer)] += 1
            except AssertionError as error:
                tally.findings.append(f"{phase or 'a random moment'}: {error}")
        tally.phases[phase or "moments"] += 1
        os.kill(child, signal.SIGCONT)


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
    tally, rng = Tally(), random.Random(given.seed)
    prepare(folder)
    writer.before(folder)
    started = time.monotonic()
    calls = calls_of(folder, writer)
    if writer.slow:
        whole_s = (time.monotonic() - started) / 2  # it was run twice
        look_on_the_way(folder, writer, given, tally, calls, whole_s)
        return tally
    if writer.anew:
        empty(folder)
    started = time.monotonic()
    finish(writer.arguments(folder))
    whole_s = time.monotonic() - started
    moments = [""] * given.kills
    moments += [phase for phase in PHASES if calls[phase] for _ in range(given.phases)]
    rng.shuffle(moments)
    ends = time.monotonic() + given.seconds
    for number in itertools.count(1):
        if not moments or time.monotonic() > ends:
            break
        phase = moments.pop()
        if phase:
            hit = kill_at(folder, writer, phase, rng.randint(1, calls[phase]))
            tally.phases[phase] += hit
        else:
            hit = kill(folder, writer, whole_s * rng.uniform(0.1, 1.0))
            tally.kills += hit
        if not hit:  # the command was faster than that
            moments.insert(0, phase)
        try:
            tally.left[look(folder, writer)] += 1
            if number % 10 == 0:
                check_next(folder, writer)
        except Exception as error:  # noqa: BLE001  whatever it is, it is what is looked for
            tally.findings.append(f"kill {number} {phase}: {type(error).__name__}: {error}")
        if writer.anew and (number % 10 == 0 or not (hit or phase)):
            empty(folder)
    _pairs(folder, writer, given, tally, whole_s)
    return tally


def _pairs(
    folder: Path, writer: Writer, given: argparse.Namespace, tally: Tally, whole_s: float
) -> None:
    rng = random.Random(given.seed)
    try:
        check_next(folder, writer)
        for number in range(given.pairs):
            if writer.anew:
                empty(folder)
            tally.pairs[pair(folder, writer, rng.uniform(0, whole_s) * (number % 2))] += 1
        check_next(folder, writer)
    except AssertionError as error:
        tally.findings.append(f"pair {sum(tally.pairs.values()) + 1}: {error}")


if __name__ == "__main__":
    main()
