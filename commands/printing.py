"""The options for what a command prints: its result as JSON, more messages, or fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..common.console import Console
from ..common.option import option
from .options import options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOptions:
    """How much a command prints besides its result."""

    verbose: bool = option(False, "Print more, and tracebacks of errors.", flag="--verbose/-v")
    quiet: bool = option(False, "Print only results and errors.", flag="--quiet/-q")

    def console(self) -> Console:
        """Returns the console for a command's progress and messages."""
        return Console(verbose=self.verbose, quiet=self.quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintOptions(MessageOptions):
    """How a command prints its result, and how much else it prints."""

    as_json: bool = option(False, "Print the result as JSON.", flag="--json")


Messages = Annotated[MessageOptions, options_of(MessageOptions)]

Printing = Annotated[PrintOptions, options_of(PrintOptions, {"Options": ["as_json"]})]
