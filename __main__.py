"""Runs the command line and turns failures into messages and exit codes."""

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
from .common.messages.shell import in_shell
from .common.text import closest
from .errors import MoexportError, is_out_of_memory, is_out_of_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.exceptions import TyperException

UNREADABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EIO)
"""The system's errors about a path that a user gave."""

RESERVE_BYTES = 32 << 20
"""Address space that is freed when memory has run out, so that the message can be printed."""


def main() -> None:
    """Runs the command line, and exits with 0 on success or with the code of the error."""
    if sys.stderr is None:  # the calling program may have closed it
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # Windows code pages lack ≤ and ×
        sys.stdout.reconfigure(errors="replace")
    console = Console(verbose=any(re.fullmatch(r"--verbose|-q*v[qv]*", arg) for arg in sys.argv))
    # A search for reference cycles at the end of the process would take 0.3 s.
    atexit.register(gc.freeze)
    try:
        # SIGTERM cleans up like an interrupt.
        with interrupts(partial(_force_exit, console)) as signals:
            _run(console, signals)
    except KeyboardInterrupt:
        _print_interrupted(console)
        sys.exit(INTERRUPTED)
    except SystemExit:
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # set by the parser for a closed pipe
            sys.exit(0)
        raise


def _print_interrupted(console: Console) -> None:
    """Removes partial output, and reports what could not be removed."""
    from .common.writing import left_behind, remove_scratch

    remove_scratch()
    remaining = ", ".join(map(str, left_behind()))
    advice = None
    journal = sys.modules.get(f"{__package__}.bench.journal")
    if journal is not None and journal.Journal.started:
        advice = "run the same command again to continue where it stopped"
    if remaining:
        advice = f"{advice}; " if advice else ""
        hint = f"{advice}any run that starts at least a day later removes these files"
        console.error(f"interrupted; partial files remain: {remaining}", hint)
    else:
        console.error("interrupted; no partial files remain", advice)


def _force_exit(console: Console) -> None:
    """Ends the process if a library is computing, because Python cannot interrupt that."""
    from .common.writing import remove_partial

    try:
        import psutil

        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                child.kill()
        remove_partial()
        _print_interrupted(console)
    finally:
        os._exit(INTERRUPTED)


def _run(console: Console, signals: list[str]) -> None:
    """Runs the command; prints any failure other than an interrupt and ends the process."""
    # Imported here, so that an interrupt while the parser loads prints no traceback.
    from typer.exceptions import TyperException

    from .cli import app

    reserve = [bytearray(RESERVE_BYTES)]  # never written to, so it takes no memory
    try:
        status = _run_parser(app, signals)
    except TyperException as error:
        _print_usage(console, error)
        sys.exit(2)
    except MoexportError as error:
        reserve.clear()
        if console.verbose:
            traceback.print_exc()
        from .common.locations import with_urls

        console.error(with_urls(error.message), error.hint)
        sys.exit(error.EXIT_CODE)
    except BrokenPipeError:
        # The reader of stdout (head, less) has closed it: exit quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if console.verbose:
            raise
        reserve.clear()
        console.error(*_unexpected(error))
        sys.exit(1)
    if status == INTERRUPTED:  # the parser's status for an interrupt
        raise KeyboardInterrupt


def _unexpected(error: Exception) -> tuple[str, str]:
    """Returns the message and the hint for an unexpected exception."""
    errors = _chain(error)
    for cause in errors:
        traceback.clear_frames(cause.__traceback__)
    from .common.writing import FULL  # imported late to keep --help fast

    if isinstance(error, OSError) and error.errno in FULL:
        return (
            f"{error.filename or 'a file'}: cannot be written: {error.strerror}",
            "free some space for -o and for temporary files (TMPDIR names their folder)",
        )
    if isinstance(error, OSError) and error.errno in UNREADABLE:
        return f"{error.filename}: {error.strerror}", "check the path and its permissions"
    memory = next(filter(is_out_of_memory, errors), None)
    if memory is not None:
        return (
            f"the machine's memory ran out ({_with_type(memory)})",
            "close other programs, raise the limit (ulimit -v), or use a machine with more memory",
        )
    if any(map(is_out_of_threads, errors)):
        return (
            "the system refuses to start another thread",
            "raise the limit (ulimit -u, or a container's pids limit), or use fewer threads: "
            "OMP_NUM_THREADS=1, or --threads 1 if the command has it",
        )
    if plugin := _running_plugin(error):
        return (
            f"{_with_type(error)} (while the plugin {plugin} was running)",
            "this is a bug in the plugin or in moexport: --verbose shows where; "
            "MOEXPORT_PLUGINS=off disables plugins",
        )
    return _with_type(error), "this is a bug in moexport: --verbose shows where; please report it"


def _running_plugin(error: Exception) -> str:
    """Returns the package of the third-party plugin that was running; empty if there was none."""
    from .common.registry import foreign_packages

    packages = foreign_packages()
    frames = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = (str(names.get("__name__")).partition(".")[0] for names in frames)
    return next((packages[name] for name in modules if name in packages), "")


def _run_parser(app: Callable[..., object], signals: list[str]) -> object:
    """Runs the parser; raises an exception that follows an interrupt as the interrupt.

    A library may swallow an interrupt during its import and fail later.
    """
    try:
        with in_shell():
            return app(prog_name="moexport", standalone_mode=False)
    except Exception as error:
        if signals:
            raise KeyboardInterrupt(signals[-1]) from error
        raise


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an error and its causes, the latest first."""
    errors: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in errors:  # a chain may be circular
        errors.append(cause)
        cause = cause.__cause__ or cause.__context__
    return errors


def _with_type(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _print_usage(console: Console, error: TyperException) -> None:
    """Prints an error of the parser in the same form as other errors."""
    context = getattr(error, "ctx", None)
    if len(sys.argv) == 1:  # the message is the help text
        print(error.format_message(), file=sys.stderr)
        return
    # The parser's prefix for invalid choices does not help users.
    message = error.format_message().replace("Value error, ", "")
    message = message.partition(" (Possible options:")[0].partition(" Did you mean")[0]
    command = context.command_path if context is not None else "moexport"
    suggestion = "" if context is None else _suggestion(error, context)
    from .common.registry import left_out

    help_hint = f"{command} --help shows the options and an example{left_out()}"
    console.error(message, f"{suggestion}{help_hint}")


def _suggestion(error: TyperException, context: Any) -> str:
    """Returns a suggestion: an option, a command or one of an option's choices."""
    choices = getattr(getattr(error, "param", None), "type_descriptor", None)
    if hasattr(error, "option_name"):
        options = [name for parameter in context.command.params for name in parameter.opts]
        return closest(error.option_name, options)
    quoted = re.search(r"'([^']*)' is not one of|No such command '([^']*)'", error.format_message())
    if quoted is None:
        return ""
    if quoted[1] is None:
        return closest(quoted[2], list(context.command.commands))
    return closest(quoted[1], [str(choice) for choice in getattr(choices, "choices", None) or ()])


if __name__ == "__main__":
    main()
