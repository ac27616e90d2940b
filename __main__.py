"""The program `moexport`: runs the command line and turns what goes wrong into exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import traceback
from typing import NoReturn

from typer.exceptions import TyperException

from .cli import app
from .console import Console
from .errors import MoexportError, UsageError

INTERRUPTED = 130


def _interrupted(signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(signum).name)


def main() -> None:
    """Runs the command line: exit 0 on success, 2 for bad usage, 1 for anything else."""
    console = Console(verbose=any(re.fullmatch(r"--verbose|-q*v[qv]*", arg) for arg in sys.argv))
    # A terminated export cleans up after itself as an interrupted one does.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _interrupted)
    # Everything goes at the end of the process: looking for cycles in it first takes 0.3 s.
    atexit.register(gc.freeze)
    try:
        _invoke()
    except TyperException as error:
        _say_usage(console, error)
        sys.exit(2)
    except MoexportError as error:
        if console.verbose:
            traceback.print_exc()
        console.error(error.message, error.hint)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        console.error("interrupted; nothing half-written was left behind")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of stdout (head, less) is gone: nothing more to say, and no traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if console.verbose:
            raise
        console.error(
            f"{type(error).__name__}: {error}",
            "this is a defect of moexport: --verbose shows where; please report it",
        )
        sys.exit(1)


def _invoke() -> None:
    """Runs the command; the parser turns an interrupt into a status, which is turned back here."""
    if app(prog_name="moexport", standalone_mode=False) == INTERRUPTED:
        raise KeyboardInterrupt


def _say_usage(console: Console, error: TyperException) -> None:
    """What the parser did not understand, in the same form as every other error."""
    context = getattr(error, "ctx", None)
    if len(sys.argv) == 1:  # the message is the help
        print(error.format_message(), file=sys.stderr)
        return
    command = context.command_path if context is not None else "moexport"
    console.error(error.format_message(), f"{command} --help shows the options and an example")


if __name__ == "__main__":
    main()
