"""The program `moexport`: runs the command line and turns what goes wrong into exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import re
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common.console import Console
from .common.interrupts import INTERRUPTED, interrupts
from .common.text import likest
from .errors import MoexportError, tells_of_memory, tells_of_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.exceptions import TyperException

UNREADABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EIO)
"""The system's errors about a path that a user gave, wherever it is first looked at."""

RESERVE_BYTES = 32 << 20
"""Address space that is given back when memory ran out, so that it can be said."""


def main() -> None:
    """Runs the command line, and exits with 0 on success or with the code of the error."""
    if sys.stderr is None:  # a program that starts this one may have closed it
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # Windows' code pages have no ≤ and no ×
        sys.stdout.reconfigure(errors="replace")
    console = Console(verbose=any(re.fullmatch(r"--verbose|-q*v[qv]*", arg) for arg in sys.argv))
    # Everything goes at the end of the process: looking for cycles in it first takes 0.3 s.
    atexit.register(gc.freeze)
    try:
        # A terminated export cleans up after itself as an interrupted one does.
        with interrupts(partial(_end, console)) as signals:
            _run(console, signals)
    except KeyboardInterrupt:
        _tell_interrupted(console)
        # Python ends by the signal, and not with a code, where the last interrupt came out of an
        # `exec` of text, which makes dataclasses, for one; the next `exec` forgets it.
        exec("")
        sys.exit(INTERRUPTED)
    except SystemExit:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # the parser's, for a closed pipe
            sys.exit(0)
        raise


def _tell_interrupted(console: Console) -> None:
    """Removes what the command began to write, and tells what it could not remove."""
    from .common.writing import left_behind, remove_scratch

    remove_scratch()
    left = ", ".join(map(str, left_behind()))
    again = "the same command goes on where it stopped" if _goes_on() else None
    if left:
        again = f"{again}; " if again else ""
        hint = f"{again}a run that begins a day later removes what was left behind"
        console.error(f"interrupted; left behind: {left}", hint)
    else:
        console.error("interrupted; nothing half-written was left behind", again)


def _end(console: Console) -> None:
    """Ends the process while a library computes, which Python cannot interrupt."""
    from .common.writing import remove_partial

    try:
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                child.kill()
        remove_partial()
        _tell_interrupted(console)
    finally:
        os._exit(INTERRUPTED)


def _goes_on() -> bool:
    """Whether a command was ended that keeps what it has found in a journal."""
    running = sys.modules.get(f"{__package__}.bench.journal")
    return running is not None and running.Journal.kept


def _run(console: Console, signals: list[str]) -> None:
    """Runs the command; what goes wrong is said and ends the process, but for an interrupt."""
    # Not above: an interrupt while the parser loads is no traceback, either.
    from typer.exceptions import TyperException

    from .cli import app

    reserve = [bytearray(RESERVE_BYTES)]  # never written to, so no memory is taken
    try:
        status = _status(app, signals)
    except TyperException as error:
        _say_usage(console, error)
        sys.exit(2)
    except MoexportError as error:
        reserve.clear()
        if console.verbose:
            traceback.print_exc()
        from .common.locations import in_words

        console.error(in_words(error.message), error.hint)
        sys.exit(error.EXIT_CODE)
    except BrokenPipeError:
        # The reader of stdout (head, less) has what it wanted: nothing more to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if console.verbose:
            raise
        reserve.clear()
        console.error(*_why(error))
        sys.exit(1)
    if status == INTERRUPTED:  # what the parser makes of an interrupt
        raise KeyboardInterrupt


def _why(error: Exception) -> tuple[str, str]:
    """What went wrong that no part of moexport expects, and what to do."""
    errors = _chain(error)
    for cause in errors:
        traceback.clear_frames(cause.__traceback__)
    from .common.writing import FULL  # only now: --help takes no longer than it must

    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.filename or 'a file'}: cannot be written: {error.strerror}",
            "free some space beside -o and for temporary files, whose folder TMPDIR names",
        )
    if isinstance(error, OSError) and error.errno in UNREADABLE:
        return f"{error.filename}: {error.strerror}", "check the path and its permissions"
    memory = next(filter(tells_of_memory, errors), None)
    if memory is not None:
        return (
            f"the machine's memory ran out ({_named(memory)})",
            "close other programs, raise the limit (ulimit -v), or take a machine with more",
        )
    if any(map(tells_of_threads, errors)):
        return (
            "the system starts no further thread",
            "raise the limit (ulimit -u, the pids of a container), or use fewer: "
            "OMP_NUM_THREADS=1, or --threads 1 where a command has it",
        )
    return _named(error), "this is a defect of moexport: --verbose shows where; please report it"


def _status(app: Callable[..., object], signals: list[str]) -> object:
    """What the parser returns; what fails after an interrupt is the interrupt.

    A library that is interrupted while it is imported may swallow that, and fail on what it lacks.
    """
    try:
        return app(prog_name="moexport", standalone_mode=False)
    except Exception as error:
        if signals:
            raise KeyboardInterrupt(signals[-1]) from error
        raise


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it came from, the latest first."""
    errors: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in errors:  # a chain may be a circle
        errors.append(cause)
        cause = cause.__cause__ or cause.__context__
    return errors


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _say_usage(console: Console, error: TyperException) -> None:
    """What the parser did not understand, in the same form as every other error."""
    context = getattr(error, "ctx", None)
    if len(sys.argv) == 1:  # the message is the help
        print(error.format_message(), file=sys.stderr)
        return
    # A choice that is none is a "Value error" of the parser's: that word tells a user nothing.
    message = error.format_message().replace("Value error, ", "")
    message = message.partition(" (Possible options:")[0].partition(" Did you mean")[0]
    command = context.command_path if context is not None else "moexport"
    near = "" if context is None else _near_miss(error, context)
    from .common.registry import left_out

    shows = f"{command} --help shows the options and an example{left_out()}"
    console.error(message, f"{near}{shows}")


def _near_miss(error: TyperException, context: Any) -> str:
    """What may have been meant: an option, a command or one of an option's choices."""
    choices = getattr(getattr(error, "param", None), "type_descriptor", None)
    if hasattr(error, "option_name"):
        options = [name for parameter in context.command.params for name in parameter.opts]
        return likest(error.option_name, options)
    quoted = re.search(r"'([^']*)' is not one of|No such command '([^']*)'", error.format_message())
    if quoted is None:
        return ""
    if quoted[1] is None:
        return likest(quoted[2], list(context.command.commands))
    return likest(quoted[1], [str(choice) for choice in getattr(choices, "choices", None) or ()])


if __name__ == "__main__":
    main()
