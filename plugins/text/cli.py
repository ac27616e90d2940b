"""`generate` and `serve`: text from the bundle of a language model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ...commands.options import AsJson, BundleArgument, Verbosity, json_text
from ...common.console import Console, show
from ...common.interrupts import in_own_process
from ...common.text import printable
from .calls import generate_as, serve_as, text_model
from .request import GenerateRequest, ServeRequest

if TYPE_CHECKING:
    from .generate import GeneratedText, TextModel

PROMPT = "> "


def generate(
    *,
    bundle: BundleArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The text to continue [default: standard input]."),
    ] = None,
    request: GenerateRequest,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Continue a text with a bundle's language model, or chat with it.

    --chat without a prompt is a conversation, a line each, until it is told to end (Ctrl-D).
    """
    in_own_process()
    console = verbosity.console()
    if prompt is None and request.chat and sys.stdin.isatty() and not as_json:
        _converse(text_model(bundle, request), request, console)
        return
    text = generate_as(bundle, sys.stdin.read() if prompt is None else prompt, request)
    if as_json:
        whole = "".join(text)
        show(json_text({"text": whole, **_taken(text)}))
        return
    _print(text, console)


def _converse(model: TextModel, request: GenerateRequest, console: Console) -> None:
    """A chat: what was said so far is part of every prompt."""
    said: list[dict[str, str]] = []
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        if not line.strip():
            continue
        said.append({"role": "user", "content": line})
        text = model.generate(said, request)
        said.append({"role": "assistant", "content": _print(text, console)})


def _print(text: GeneratedText, console: Console) -> str:
    """Prints a text as it comes, and then what it took, also where it is interrupted."""
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
            f"{text.prompt_tokens} tokens of prompt in {text.first_token_s:.2f} s, "
            f"{text.tokens} generated{speed}"
        )
    return "".join(pieces)


def _taken(text: GeneratedText) -> dict[str, object]:
    return {
        "finish": text.finish,
        "prompt_tokens": text.prompt_tokens,
        "tokens": text.tokens,
        "first_token_s": text.first_token_s,
        "tokens_per_second": text.tokens_per_second,
    }


def serve(*, bundle: BundleArgument, request: ServeRequest, verbosity: Verbosity) -> None:
    """Serve a bundle's language model to clients of OpenAI's protocol.

    Completions and chats, streamed or whole, at http://HOST:PORT/v1; /health and /metrics. A line
    of log a request goes to standard error.
    """
    import logging  # only here: --help takes no longer than it must

    in_own_process()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("moexport.serve").setLevel("ERROR" if verbosity.quiet else "INFO")
    where = f"http://{request.host}:{request.port}/v1"
    verbosity.console().step(f"serving {bundle} at {where}; Ctrl-C ends it")
    serve_as(bundle, request)
