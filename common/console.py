"""Terminal output: results go to stdout, progress and messages to stderr."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from .text import printable

if TYPE_CHECKING:
    import rich.progress


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
"""The pages in a clone or in the installed package."""

_PAGE = re.compile(r"(?<![\w/\\.-])docs/([\w-]+\.md)")
"""A page as messages name it: `docs/families.md`, with or without an anchor."""


def with_pages(text: str) -> str:
    """Returns a message with the full paths of the pages that it names.

    `docs/families.md` is a path only in a clone: an installed package has its pages in its own
    folder. The name of a missing page is unchanged.
    """
    return _PAGE.sub(_file_of, text) if "docs/" in text else text


def _file_of(named: re.Match[str]) -> str:
    relative = Path(named[0])
    file = page_file(named[1])
    if file is None or (relative.is_file() and relative.samefile(file)):
        return named[0]
    return str(file)


def page_file(name: str) -> Path | None:
    """Returns the file of a page, in `docs/` or in the folder of its plugin."""
    files = (DOCS / name, *ROOT.glob(f"plugins/*/docs/{name}"))
    return next((file for file in files if file.is_file()), None)


def show(text: str, end: str = "\n") -> None:
    """Prints a result to stdout."""
    # Flushed at once, so that stdout and stderr stay in order when both go to one file.
    print(printable(text, several=True), end=end, flush=True)


_NAME = "moexport: "

NARROW = 60
"""Width in columns below which the progress bar is short and shows only the time left."""


LINE_INTERVAL_S = 10.0
"""Seconds between lines about a step with many short parts if stderr is not a terminal."""


class Console:
    """Prints progress and messages, at the chosen verbosity (a `Progress`).

    On a terminal a step is one line with a bar; otherwise it is a plain line. Plain lines that
    differ only after a colon (`searching: 3 graphs`) are thinned out, unless `verbose`. Leaving the
    context removes the bar.
    """

    _live: ClassVar[rich.progress.Progress | None] = None  # shared: a terminal shows one bar

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose = verbose
        self.quiet = quiet
        self._stream = sys.stderr  # kept, because PyTorch replaces it while it traces
        self._rate: _Rate | None = None
        self._last, self._printed = "", -LINE_INTERVAL_S

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """Begins a step; `total` is the amount of work, if known, in `unit`."""
        if self.quiet:
            return
        text = printable(text, several=True)
        if not self._stream.isatty():
            self._plain_step(text, total, unit)
            return
        bar = Console._live
        if bar is None:
            bar = Console._live = _new_bar()
            bar.start()
        # Finished steps need no bar.
        for task in bar.task_ids:
            bar.remove_task(task)
        if "\n" in text or (total is None and len(text) > bar.console.width - len(_NAME)):
            # A plan or a sentence would not fit into the bar's line.
            bar.console.print(f"{_NAME}{text}", markup=False, emoji=False, highlight=False)
            return
        bar.add_task(text, total=total, unit=unit)

    def _plain_step(self, text: str, total: int | None, unit: str | None) -> None:
        self._end_rate()
        what, colon, _ = text.partition(": ")
        repeats = bool(colon) and unit is None and what == self._last and not self.verbose
        if not repeats or time.monotonic() - self._printed > LINE_INTERVAL_S:
            print(f"{_NAME}{text}", file=self._stream, flush=True)
            self._last, self._printed = what, time.monotonic()
        self._rate = None if unit is None else _Rate(text, total, unit)

    def advance(self, amount: int) -> None:
        """Moves the bar forward."""
        if self._rate is not None:
            self._rate.advance(amount)
        if Console._live is not None and Console._live.task_ids and not self.quiet:
            Console._live.advance(Console._live.task_ids[-1], amount)

    def finish(self) -> None:
        """Removes the bar, so that later output replaces it."""
        self._end_rate()
        if Console._live is not None:
            Console._live.stop()
            Console._live = None

    def note(self, text: str) -> None:
        """Prints a message, unless `quiet`."""
        if not self.quiet:
            self.finish()
            print(f"note: {printable(with_pages(text))}", file=self._stream, flush=True)

    def error(self, message: str, hint: str | None = None) -> None:
        """Prints an error and its hint."""
        self.finish()
        print(f"error: {printable(with_pages(message))}", file=self._stream, flush=True)
        if hint:
            print(f"hint: {printable(with_pages(hint))}", file=self._stream, flush=True)

    def _end_rate(self) -> None:
        if self._rate is not None:
            self._rate.end()
            self._rate = None


class _Rate:
    """Prints progress, rate and remaining time of a long step as plain lines."""

    EVERY_S = 10.0

    def __init__(self, text: str, total: int | None, unit: str) -> None:
        self._text, self._total, self._unit = text, total, unit
        self._done = 0
        self._started = self._printed = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed < self.EVERY_S:
            return
        self._printed = now
        rate = self._done / (now - self._started)
        total, left = "", ""
        if self._total is not None:
            total = f" of {self._total:,}"
            left = f", {(self._total - self._done) / rate:.0f} s left"
        self._print(f"{self._done:,}{total} {self._unit}, {_per_second(rate, self._unit)}{left}")

    def end(self) -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = _per_second(self._done / seconds, self._unit)
        self._print(f"{self._done:,} {self._unit} in {seconds:.1f} s, {rate}")

    def _print(self, text: str) -> None:
        print(f"{_NAME}{self._text}: {text}", file=sys.stderr, flush=True)


def _per_second(rate: float, unit: str) -> str:
    return f"{rate:.1f} {unit}/s" if rate < 10 else f"{rate:,.0f} {unit}/s"


def _new_bar() -> rich.progress.Progress:
    from rich import console, progress, text
    from rich.table import Column

    class RateColumn(progress.ProgressColumn):
        """Units per second, for steps with a unit."""

        def render(self, task: progress.Task) -> text.Text:
            unit = task.fields.get("unit")
            if unit is None or not task.speed:
                return text.Text("")
            return text.Text(_per_second(task.speed, unit))

    screen = console.Console(file=sys.stderr)
    narrow = screen.width < NARROW
    # A long description is cut off, because it would push the bar off the line.
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


@runtime_checkable
class Progress(Protocol):
    """Receives the steps of a job and their progress."""

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """A step begins; `total` is its amount of work, or None if unknown.

        Steps with a `unit` also show a rate, such as 12 inputs/s.
        """
        ...

    def advance(self, amount: int) -> None:
        """`amount` more of the step's work is done."""
        ...


class Silent:
    """A `Progress` that prints nothing."""

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """Does nothing."""

    def advance(self, amount: int) -> None:
        """Does nothing."""
