"""The options for language models: texts, serving, layouts.

This module imports no large library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ...common.option import Panel, Request, option, spelled
from ...common.text import near_miss
from ...errors import UsageError

API = 1

TextLayout = Literal["transformers-js", "optimum"]
"""The programs with their own folder layout; `layouts.py` has a step of the same name for each."""

SMALLEST_TOP_P = 2.0**-149
"""The smallest 32-bit float above 0; 0 would draw from all tokens."""


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """The layouts for programs that generate text from a bundle."""

    layout: TextLayout | None = option(None, "Also write a folder for this program.", unset="none")

    def __post_init__(self) -> None:
        """Raises `UsageError` for an unknown program."""
        names = get_args(TextLayout)
        if self.layout not in (None, *names):
            raise UsageError(
                f"--layout {self.layout}: unknown value", hint=near_miss(str(self.layout), names)
            )


PANEL = Panel(
    "text",
    "Text",
    ("export",),
    LayoutOptions,
    "moexport.plugins.text.cli:layout_options",
    rare=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(Request):
    """The options of generating a text."""

    chat: bool = option(
        False, "Treat the prompt as a user's message, formatted by the model's chat template."
    )
    system: str | None = option(None, "A system message before the prompt.", unset="none")
    max_tokens: int = option(256, "The largest number of tokens to generate.")
    temperature: float | None = option(
        None,
        "The temperature: scores are divided by it before a token is drawn; 0 selects the most "
        "likely token.",
        unset="the model's own",
    )
    top_p: float | None = option(
        None,
        "Draw from the most likely tokens whose probabilities add up to this.",
        unset="the model's own",
    )
    top_k: int | None = option(
        None, "Draw from this many of the most likely tokens.", unset="the model's own"
    )
    seed: int | None = option(None, "The same seed draws the same tokens.", unset="a random one")
    context: int | None = option(
        None,
        "The largest number of tokens of prompt and text together; the cache has room for them.",
        unset="the model's own",
    )
    stop: Sequence[str] = option((), "End before this text. Repeat it for several.", unset="none")
    threads: int | None = option(
        None, "The number of ONNX Runtime threads.", unset="its own choice"
    )

    def __post_init__(self) -> None:
        """Raises `UsageError` for an invalid value."""
        for name, fits, allowed in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0 <= (self.temperature or 0) < math.inf, "0 or more"),
            (
                "top_p",
                self.top_p is None or SMALLEST_TOP_P <= self.top_p <= 1,
                "above 0 and at most 1",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more"),
            ("seed", 0 <= (self.seed or 0) < 2**31, "from 0 to 2147483647"),
        ):
            if not fits:
                spelling = spelled(GenerateRequest, name)
                raise UsageError(
                    f"{spelling} {getattr(self, name)}: it must be {allowed}",
                    hint=f"omit {spelling} to use the default",
                )
        if "" in self.stop:
            raise UsageError("--stop: the text is empty", hint="omit --stop")
        if self.system is not None and not self.chat:
            raise UsageError("--system: only a chat has a system message", hint="add --chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest(Request):
    """The options of serving a language model."""

    host: str = option("127.0.0.1", "The address to listen on; 0.0.0.0 means all addresses.")
    port: int = option(8080, "The port.")
    name: str | None = option(None, "The model's name in requests.", unset="the bundle's folder")
    max_tokens: int = option(
        4096, "The largest number of tokens of a text; a client may ask for fewer."
    )
    context: int | None = option(
        None,
        "The largest number of tokens of prompt and text together; each cache has room for them.",
        unset="the model's own",
    )
    threads: int | None = option(
        None, "The number of ONNX Runtime threads.", unset="its own choice"
    )
