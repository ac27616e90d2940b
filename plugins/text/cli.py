"""The commands `generate` and `serve`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ...commands.options import BundleArgument, json_text, options_of
from ...commands.printing import Messages, Printing
from ...common.console import Console, show
from ...common.interrupts import in_own_process
from ...common.text import printable
from .calls import generate as generate_text
from .calls import serve as serve_bundle
from .calls import text_model
from .request import GenerateRequest, LayoutOptions, ServeRequest

if TYPE_CHECKING:
    from .generate import GeneratedText, TextModel

PROMPT = "> "


OPTIONS = options_of(
    GenerateRequest,
    {
        "Prompt": ("chat", "system"),
        "Sampling": (*("max_tokens", "temperature", "top_p", "top_k", "seed", "context", "stop"),),
        "Runtime": ("threads",),
    },
    max_tokens={"metavar": "N"},
    context={"min": 2},
    stop={"metavar": "TEXT"},
    threads={"min": 1},
)


def generate(
    *,
    bundle: BundleArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The text to continue [default: standard input]."),
    ] = None,
    request: Annotated[GenerateRequest, OPTIONS],
    printing: Printing,
) -> None:
    """Continue a text with a bundle's language model, or chat with it.

    --chat without a prompt starts a conversation, one line per message, until Ctrl-D.
    """
    in_own_process()
    console = printing.console()
    if prompt is None and request.chat and sys.stdin.isatty() and not printing.as_json:
        _converse(text_model(bundle, request), request, console)
        return
    text = generate_text(bundle, sys.stdin.read() if prompt is None else prompt, request)
    if printing.as_json:
        complete = "".join(text)
        show(json_text({"text": complete, **_statistics(text)}))
        return
    _print(text, console)


def _converse(model: TextModel, request: GenerateRequest, console: Console) -> None:
    """Runs a chat in which every prompt contains all earlier messages."""
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        text = model.generate(messages, request)
        messages.append({"role": "assistant", "content": _print(text, console)})


def _print(text: GeneratedText, console: Console) -> str:
    """Prints a text while it is generated, then its statistics, even after an interruption."""
    pieces: list[str] = []
    try:
        for piece in text:
            pieces.append(piece)
            print(printable(piece, several=True), end="", flush=True)
    finally:
        print(flush=True)
        rate = text.tokens_per_second
        speed = "" if rate is None else f" at {rate:.1f} tokens/s"
        console.note(
            f"{text.prompt_tokens} prompt tokens in {text.first_token_s:.2f} s, "
            f"{text.tokens} generated{speed}"
        )
    return "".join(pieces)


def _statistics(text: GeneratedText) -> dict[str, object]:
    return {
        "finish": text.finish,
        "prompt_tokens": text.prompt_tokens,
        "tokens": text.tokens,
        "first_token_s": text.first_token_s,
        "tokens_per_second": text.tokens_per_second,
    }


def serve(
    *,
    bundle: BundleArgument,
    request: Annotated[
        ServeRequest,
        options_of(
            ServeRequest,
            port={"min": 1, "max": 65535},
            max_tokens={"min": 1},
            context={"min": 2},
            threads={"min": 1},
        ),
    ],
    messages: Messages,
) -> None:
    """Serve a bundle's language model to clients of OpenAI's protocol.

    It serves completions and chats, streamed or whole, at http://HOST:PORT/v1, and /health and
    /metrics. It logs a line for each request to standard error.
    """
    import logging  # imported here to keep --help fast

    in_own_process()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("moexport.serve").setLevel("ERROR" if messages.quiet else "INFO")
    url = f"http://{request.host}:{request.port}/v1"
    from ...exporter.bundle.bundle import Bundle
    from .generate import check_generates

    opened = Bundle.open(bundle)
    check_generates(opened)
    messages.console().step(f"serving {bundle} at {url}; Ctrl-C ends it")
    serve_bundle(opened, request)


layout_options = options_of(LayoutOptions)
