"""The commands `generate` and `serve`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ...commands.options import AsJson, BundleArgument, Quiet, Verbose, json_text, option_for
from ...common.console import Console, show
from ...common.interrupts import in_own_process
from ...common.text import printable
from .calls import generate as continued
from .calls import serve as answer
from .calls import text_model
from .request import GenerateRequest, LayoutOptions, ServeRequest, TextLayout

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
    chat: Annotated[bool, option_for(GenerateRequest, "chat", "Prompt")] = False,
    system: Annotated[str | None, option_for(GenerateRequest, "system", "Prompt")] = None,
    max_tokens: Annotated[
        int, option_for(GenerateRequest, "max_tokens", "Sampling", metavar="N")
    ] = 256,
    temperature: Annotated[
        float | None, option_for(GenerateRequest, "temperature", "Sampling")
    ] = None,
    top_p: Annotated[float | None, option_for(GenerateRequest, "top_p", "Sampling")] = None,
    top_k: Annotated[int | None, option_for(GenerateRequest, "top_k", "Sampling")] = None,
    seed: Annotated[int | None, option_for(GenerateRequest, "seed", "Sampling")] = None,
    context: Annotated[
        int | None, option_for(GenerateRequest, "context", "Sampling", min=2)
    ] = None,
    stop: Annotated[
        list[str] | None, option_for(GenerateRequest, "stop", "Sampling", metavar="TEXT")
    ] = None,
    threads: Annotated[int | None, option_for(GenerateRequest, "threads", "Runtime", min=1)] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Continue a text with a bundle's language model, or chat with it.

    --chat without a prompt starts a conversation, one line per message, until Ctrl-D.
    """
    in_own_process()
    console = Console(verbose=verbose, quiet=quiet)
    request = GenerateRequest(
        chat=chat,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        context=context,
        stop=stop or (),
        threads=threads,
    )
    if prompt is None and chat and sys.stdin.isatty() and not as_json:
        _converse(text_model(bundle, request), request, console)
        return
    text = continued(bundle, sys.stdin.read() if prompt is None else prompt, request)
    if as_json:
        whole = "".join(text)
        show(json_text({"text": whole, **_taken(text)}))
        return
    _print(text, console)


def _converse(model: TextModel, request: GenerateRequest, console: Console) -> None:
    """Runs a chat in which every prompt contains all earlier messages."""
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


def _taken(text: GeneratedText) -> dict[str, object]:
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
    host: Annotated[str, option_for(ServeRequest, "host")] = "127.0.0.1",
    port: Annotated[int, option_for(ServeRequest, "port", min=1, max=65535)] = 8080,
    name: Annotated[str | None, option_for(ServeRequest, "name")] = None,
    max_tokens: Annotated[int, option_for(ServeRequest, "max_tokens", min=1)] = 4096,
    context: Annotated[int | None, option_for(ServeRequest, "context", min=2)] = None,
    threads: Annotated[int | None, option_for(ServeRequest, "threads", min=1)] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Serve a bundle's language model to clients of OpenAI's protocol.

    It serves completions and chats, streamed or whole, at http://HOST:PORT/v1, and /health and
    /metrics. It logs a line for each request to standard error.
    """
    import logging  # imported here to keep --help fast

    in_own_process()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("moexport.serve").setLevel("ERROR" if quiet else "INFO")
    request = ServeRequest(
        host=host, port=port, name=name, max_tokens=max_tokens, context=context, threads=threads
    )
    where = f"http://{host}:{port}/v1"
    from ...exporter.bundle.bundle import Bundle
    from .generate import check_generates

    opened = Bundle.open(bundle)
    check_generates(opened)
    Console(verbose=verbose, quiet=quiet).step(f"serving {bundle} at {where}; Ctrl-C ends it")
    answer(opened, request)


def layout_options(
    *,
    layout: Annotated[TextLayout | None, option_for(LayoutOptions, "layout")] = None,
) -> LayoutOptions:
    """Returns the options of `export` for programs that generate text."""
    return LayoutOptions(layout=layout)
