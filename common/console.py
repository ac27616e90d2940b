"""What the command line prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, ClassVar, Protocol

from .text import printable

if TYPE_CHECKING:
    import rich.progress


def show(text: str, end: str = "\n") -> None:
    """Prints a result to stdout."""
    # At once: where stdout and stderr are one file, results stand where they were said.
    print(printable(text, several=True), end=end, flush=True)


_NAME = "moexport: "

NARROW = 60
"""Columns of a terminal below which the bar is short and alone with the time that is left."""


SEARCHING_S = 10.0
"""How often a search that takes many short steps says so where there is no terminal."""


class Console:
    """Says what is going on, as much as the user asked for (a `Progress`).

    Steps are one line with a bar on a terminal, and a plain line each elsewhere: of those that
    differ only after a colon (`searching: 3 graphs`) one now and then, unless `verbose`. It is a
    context manager: leaving it ends the bar.
    """

    _live: ClassVar[rich.progress.Progress | None] = None  # a terminal has one, whoever has made it

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose = verbose
        self.quiet = quiet
        self._rate: _Rate | None = None
        self._last, self._said = "", -SEARCHING_S

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """Says what begins now; `total` is its work where that is known, in a `unit`."""
        if self.quiet:
            return
        text = printable(text, several=True)
        if not sys.stderr.isatty():
            self._plain_step(text, total, unit)
            return
        bar = Console._live
        if bar is None:
            bar = Console._live = _new_bar()
            bar.start()
        # Work that ended is of no interest, and of unknown work a bar that moves says enough.
        for task in bar.task_ids:
            bar.remove_task(task)
        if "\n" in text or (total is None and len(text) > bar.console.width - len(_NAME)):
            # A plan, or a sentence: a line of the bar would cut it.
            bar.console.print(f"{_NAME}{text}", markup=False, emoji=False, highlight=False)
            return
        bar.add_task(text, total=total, unit=unit)

    def _plain_step(self, text: str, total: int | None, unit: str | None) -> None:
        self._end_rate()
        what, colon, _ = text.partition(": ")
        again = bool(colon) and unit is None and what == self._last and not self.verbose
        if not again or time.monotonic() - self._said > SEARCHING_S:
            print(f"{_NAME}{text}", file=sys.stderr, flush=True)
            self._last, self._said = what, time.monotonic()
        self._rate = None if unit is None else _Rate(text, total, unit)

    def advance(self, amount: int) -> None:
        """Moves the bar of the step."""
        if self._rate is not None:
            self._rate.advance(amount)
        if Console._live is not None and Console._live.task_ids and not self.quiet:
            Console._live.advance(Console._live.task_ids[-1], amount)

    def finish(self) -> None:
        """Ends the bar, of which nothing stays: what follows is printed in its place."""
        self._end_rate()
        if Console._live is not None:
            Console._live.stop()
            Console._live = None

    def note(self, text: str) -> None:
        """Says something the user should know, unless told to be quiet."""
        if not self.quiet:
            self.finish()
            print(f"note: {printable(text)}", file=sys.stderr, flush=True)

    def error(self, message: str, hint: str | None = None) -> None:
        """Says what went wrong and what to do."""
        self.finish()
        print(f"error: {printable(message)}", file=sys.stderr, flush=True)
        if hint:
            print(f"hint: {printable(hint)}", file=sys.stderr, flush=True)

    def _end_rate(self) -> None:
        if self._rate is not None:
            self._rate.end()
            self._rate = None


class _Rate:
    """Tells in plain lines how far a long step is, how fast it goes and how long it will take."""

    EVERY_S = 10.0

    def __init__(self, text: str, total: int | None, unit: str) -> None:
        self._text, self._total, self._unit = text, total, unit
        self._done = 0
        self._started = self._said = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._said < self.EVERY_S:
            return
        self._said = now
        rate = self._done / (now - self._started)
        of, left = "", ""
        if self._total is not None:
            of = f" of {self._total:,}"
            left = f", {(self._total - self._done) / rate:.0f} s left"
        self._say(f"{self._done:,}{of} {self._unit}, {_per_second(rate, self._unit)}{left}")

    def end(self) -> None:
        took = max(time.monotonic() - self._started, 1e-9)
        rate = _per_second(self._done / took, self._unit)
        self._say(f"{self._done:,} {self._unit} in {took:.1f} s, {rate}")

    def _say(self, text: str) -> None:
        print(f"{_NAME}{self._text}: {text}", file=sys.stderr, flush=True)


def _per_second(rate: float, unit: str) -> str:
    return f"{rate:.1f} {unit}/s" if rate < 10 else f"{rate:,.0f} {unit}/s"


def _new_bar() -> rich.progress.Progress:
    from rich import console, progress, text
    from rich.table import Column

    class RateColumn(progress.ProgressColumn):
        """Units a second, of the steps that have a unit."""

        def render(self, task: progress.Task) -> text.Text:
            unit = task.fields.get("unit")
            if unit is None or not task.speed:
                return text.Text("")
            return text.Text(_per_second(task.speed, unit))

    screen = console.Console(stderr=True)
    narrow = screen.width < NARROW
    # What a step is called gives way to the bar: without it a long name would push it off the line.
    name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return progress.Progress(
        progress.TextColumn(f"{_NAME}{{task.description}}", markup=False, table_column=name),
        progress.BarColumn(6 if narrow else 20),
        *(() if narrow else (progress.TimeElapsedColumn(),)),
        progress.TimeRemainingColumn(),
        *(() if narrow else (RateColumn(),)),
        console=screen,
        expand=True,
        transient=True,
    )


class Progress(Protocol):
    """Told which step begins, and how far it is where that can be known."""

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """A step begins; `total` is its work, None where that is not known.

        With a `unit` its rate is of interest: so many `inputs` a second.
        """
        ...

    def advance(self, amount: int) -> None:
        """A part of the step's work is done."""
        ...


class Silent:
    """Progress that nobody watches."""

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """Says nothing."""

    def advance(self, amount: int) -> None:
        """Says nothing."""
