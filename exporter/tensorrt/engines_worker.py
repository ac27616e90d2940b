"""The process that compiles an engine: `python -m moexport.exporter.tensorrt.engines_worker`.

A build has a process of its own because one process can hold one TensorRT under Polygraphy, because
a build that runs out of memory or is interrupted must not take the program with it, and because its
peak memory can be told then. A request comes as JSON on stdin; events go as JSON lines to stdout.
What TensorRT prints goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

PER_MILLE = 1000

NOISE = ("Thread context has not been set",)
"""Words of lines that TensorRT calls errors and that mean nothing."""


class Events:
    """Writes events for the parent process."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def say(self, kind: str, **content: Any) -> None:
        """Sends one event."""
        self._stream.write(json.dumps({"event": kind, **content}) + "\n")
        self._stream.flush()


class Fraction:
    """How much of a tree of phases is done, in per mille of the whole; never goes back."""

    def __init__(self) -> None:
        self._phases: dict[str, list[Any]] = {}  # name: parent, steps, steps done
        self._best = 0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of so many steps begins within a step of its parent."""
        self._phases[name] = [parent, max(1, steps), 0]

    def step(self, name: str, step: int) -> int:
        """A step of a phase is done; returns the whole's per mille."""
        if name in self._phases:
            self._phases[name][2] = step + 1
        self._best = max(self._best, int(PER_MILLE * min(1.0, self._done(name))))
        return self._best

    def finish(self, name: str) -> None:
        """A phase is over."""
        self._phases.pop(name, None)

    def _done(self, name: str, inner: float = 0.0) -> float:
        if name not in self._phases:
            return 0.0
        parent, steps, done = self._phases[name]
        share = min(1.0, (done + inner) / steps)
        return share if parent is None else self._done(parent, share)


class ErrorLines(logging.Handler):
    """Keeps what TensorRT and Polygraphy report as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one line."""
        text = " ".join(record.getMessage().split())
        if not any(words in text for words in NOISE):
            self.lines.append(text)


def main() -> None:
    """Serves one request."""
    # What native code prints to stdout must not mix with the events.
    events = Events(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if request["flavour"] == "tensorrt-rtx" else "0"
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    errors = ErrorLines()
    try:
        result = _build(request, events, errors, stop)
    except MemoryError:
        events.say("failed", lines=[*errors.lines, "MemoryError"], canceled=False)
    except Exception as error:  # noqa: BLE001  every failure is the parent's to explain
        lines = [*errors.lines, " ".join(f"{type(error).__name__}: {error}".split())]
        events.say("failed", lines=lines, canceled=stop.is_set())
    else:
        events.say("built", **result)


def _build(
    request: dict[str, Any], events: Events, errors: ErrorLines, stop: threading.Event
) -> dict[str, Any]:
    """Compiles the engine into the file that the request names and returns what was read back."""
    started = time.monotonic()
    import polygraphy.backend.trt as backend
    from polygraphy.logger import G_LOGGER

    from .worker import compile_engine

    G_LOGGER.module_severity = G_LOGGER.WARNING
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.python_logger.addHandler(errors)
    G_LOGGER.python_logger.propagate = False
    parent = os.getppid()
    fraction = Fraction()
    compiled = compile_engine(
        backend,
        request,
        on_start=fraction.start,
        on_finish=fraction.finish,
        on_step=lambda name, step: _step(events, fraction.step(name, step), stop, parent),
    )
    with Path(request["output"]).open("wb") as file:
        file.write(memoryview(compiled.plan))
    return {
        **compiled.facts,
        "seconds": round(time.monotonic() - started, 3),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held.

    Linux tells it of this program alone; what `getrusage` tells begins with the size of whoever
    started it.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage * (1 if sys.platform == "darwin" else 1024)


def _step(events: Events, per_mille: int, stop: threading.Event, parent: int) -> bool:
    """Tells how far the build is; False cancels it, also when nobody waits for it any more."""
    events.say("step", done=per_mille)
    return not stop.is_set() and os.getppid() == parent


if __name__ == "__main__":
    main()
