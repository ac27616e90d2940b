"""Turns signals into exceptions, or ends the process by force while a library computes."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import NoReturn

GRACE_S = 2.0
"""How long Python may take to raise its exception after the first signal."""

INTERRUPTED = 130
"""The exit code of a command that a signal has ended."""

PR_SET_PDEATHSIG = 1

REPEAT_S = 0.2
"""Signals closer together than this count as one: `systemctl stop` sends two."""


@contextmanager
def interrupts(end: Callable[[], None]) -> Iterator[list[str]]:
    """Within the block, SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`; yields their names.

    Python raises only between two of its own instructions, so not during a library's long
    computation (a graph, a compilation). A thread therefore waits for `GRACE_S` or a second signal
    and then calls `end`, which must end the process. Ignored signals (`nohup`) stay ignored.
    """
    received: list[str] = []
    raised_at = [0.0]

    def interrupt(signum: int, _frame: object) -> NoReturn:
        received.append(signal.Signals(signum).name)
        raised_at[0] = time.monotonic()
        raise KeyboardInterrupt(received[-1])

    numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    caught = [n for n in numbers if n is not None and signal.getsignal(n) is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, interrupt)
    with _watched(caught, raised_at, end):
        yield received


def in_own_process() -> None:
    """Continues in a child process, which the parent can kill.

    ONNX Runtime GenAI holds Python's lock while it reads a graph or processes a prompt: during that
    time no thread of the process handles signals, so another process must end it.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    started = spec.name if spec is not None else Path(getattr(main, "__file__", "")).name
    if sys.platform == "linux" and started in ("moexport.__main__", "moexport"):
        supervise()


def supervise() -> None:
    """Returns only in a child process; the parent waits for it and exits with its status."""
    if sys.platform == "win32":  # cannot fork
        return
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a child can do without the thread that watches signals
        child = os.fork()
    signal.set_wakeup_fd(-1)
    if child == 0:
        _die_with(parent)
        return
    received_at: list[float] = []

    def forward(signum: int, _frame: object) -> None:
        received_at.append(time.monotonic())
        if signum == signal.SIGINT and any(map(os.isatty, range(3))):
            return  # the terminal sends it to both processes
        with suppress(ProcessLookupError):
            os.kill(child, signum)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), forward)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        repeated = len(received_at) > 1 and received_at[-1] - received_at[0] > REPEAT_S
        if received_at and (repeated or time.monotonic() - received_at[0] > GRACE_S):
            os.kill(child, signal.SIGKILL)
            print("error: interrupted while a library was computing", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        time.sleep(REPEAT_S / 10)


def _die_with(parent: int) -> None:
    """Asks the kernel to end this process when its parent is killed."""
    if sys.platform != "linux":
        return
    import ctypes  # imported late to keep --help fast

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was killed before prctl
        os._exit(INTERRUPTED)


@contextmanager
def _watched(caught: list[int], raised_at: list[float], end: Callable[[], None]) -> Iterator[None]:
    """Within the block, a thread calls `end` for signals that Python does not handle in time."""
    if sys.platform == "win32":  # Windows reports signals through sockets only
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    with suppress(RuntimeError):  # without a thread, signals wait for Python
        Thread(target=_watch, args=(reader, caught, raised_at, end), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)


def _watch(reader: int, caught: list[int], raised_at: list[float], end: Callable[[], None]) -> None:
    waiting = time.monotonic()
    while content := os.read(reader, 1):
        # Python may raise the exception before this thread reads the signal.
        since = min(waiting, time.monotonic() - REPEAT_S)
        if content[0] in caught and _stuck(reader, raised_at, since):
            end()
        waiting = time.monotonic()
    os.close(reader)


def _stuck(reader: int, raised_at: list[float], since: float) -> bool:
    """Whether Python fails to raise an exception after `since`, in time or before a new signal."""
    sent = time.monotonic()
    while raised_at[0] < since:
        waited = time.monotonic() - sent
        if waited >= GRACE_S:
            return True
        if waited >= REPEAT_S and select.select([reader], [], [], 0)[0]:
            return raised_at[0] < since
        time.sleep(REPEAT_S / 10)
    return False
