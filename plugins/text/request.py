"""What is asked of a language model: texts, serving, a folder for a program. Loads nothing."""

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
"""Whose names and folders: each is written by the step of that name (`layouts.py`)."""

LEAST_TOP_P = 2.0**-149
"""The smallest 32-bit number above 0, which would draw from all tokens."""


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """Which programs find the files of a bundle of texts."""

    layout: TextLayout | None = option(None, "Also write a folder for this program.", unset="none")

    def __post_init__(self) -> None:
        """Raises `UsageError` for a program that is none of them."""
        names = get_args(TextLayout)
        if self.layout not in (None, *names):
            raise UsageError(
                f"--layout {self.layout}: unknown value", hint=near_miss(str(self.layout), names)
            )


PANEL = Panel("text", "Text", ("export",), LayoutOptions, rare=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(Request):
    """How a language model continues a text."""

    chat: bool = option(
        False,
        "Take the prompt for a user's message, as the model's chat template writes it.",
        heading="Prompt",
    )
    system: str | None = option(None, "A system message before it.", unset="none")
    max_tokens: int = option(
        256, "How many tokens to generate at most.", heading="Sampling", metavar="N"
    )
    temperature: float | None = option(
        None,
        "What scores are divided by before a token is drawn; 0 takes the likeliest token.",
        unset="the model's own",
    )
    top_p: float | None = option(
        None,
        "Draw from the likeliest tokens of so much probability together.",
        unset="the model's own",
    )
    top_k: int | None = option(
        None, "Draw from so many tokens, the likeliest.", unset="the model's own"
    )
    seed: int | None = option(
        None, "The same seed draws the same tokens.", unset="another one each time"
    )
    context: int | None = option(
        None,
        "The tokens of prompt and text together at most, which the cache has room for.",
        unset="the model's own",
        min=2,
    )
    stop: Sequence[str] = option(
        (), "End before this text. Repeat it for several.", unset="none", metavar="TEXT"
    )
    threads: int | None = option(
        None,
        "The number of ONNX Runtime threads.",
        unset="its own choice",
        heading="Runtime",
        min=1,
    )

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that nothing can be drawn with."""
        for name, fits, wanted in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("temperature", 0 <= (self.temperature or 0) < math.inf, "0 or more"),
            # As a 32-bit number, 0 would draw from all tokens.
            (
                "top_p",
                self.top_p is None or LEAST_TOP_P <= self.top_p <= 1,
                "above 0 and at most 1",
            ),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more"),
            ("seed", 0 <= (self.seed or 0) < 2**31, "from 0 to 2147483647"),
        ):
            if not fits:
                spelling = spelled(GenerateRequest, name)
                raise UsageError(
                    f"{spelling} {getattr(self, name)}: it must be {wanted}",
                    hint=f"leave {spelling} out for the default",
                )
        if "" in self.stop:
            raise UsageError("--stop: it is empty", hint="leave it out")
        if self.system is not None and not self.chat:
            raise UsageError("--system: only a chat has a system message", hint="add --chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest(Request):
    """Where a language model is served."""

    host: str = option("127.0.0.1", "The address to listen at; 0.0.0.0 is every one.")
    port: int = option(8080, "The port.", min=1, max=65535)
    name: str | None = option(None, "What requests call the model.", unset="the bundle's folder")
    max_tokens: int = option(
        4096, "How many tokens a text has at most; a client may ask for fewer.", min=1
    )
    context: int | None = option(
        None,
        "The tokens of prompt and text together at most, which a cache has room for.",
        unset="the model's own",
        min=2,
    )
    threads: int | None = option(
        None, "The number of ONNX Runtime threads.", unset="its own choice", min=1
    )
