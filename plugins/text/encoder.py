"""A process that reads requests and tokenises their prompts; `prompts.py` starts it.

The chat template of a bundle is a program, a pattern in its tokenizer may run for years, and a
client may send anything. Each request is therefore handled in a copy of this process (a fork, if
the system supports it), which frees its memory when it ends and is killed after a time limit.
Templates run in Jinja's sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...common.documents import object_in
from ...common.text import printable
from ...errors import UsageError
from .files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, template_in
from .server.protocol import NoSuchModelError, parse_request

if TYPE_CHECKING:
    import jinja2

MEMORY_BYTES = 4 << 30
"""The memory limit of this process, if the system supports limits; large tokenizers need 1 GB."""

MAX_MESSAGE = 300
"""The largest length of a library's message in characters; longer ones are cut."""

Chat = Sequence[Mapping[str, str]]


class Encoder:
    """The tokenizer and the chat template of a folder; `context` limits the tokens of a prompt."""

    def __init__(self, folder: Path, context: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        # The file may enable padding and truncation, which are for batches.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        words = self._tokenizer.get_vocab(with_added_tokens=True)
        self._context, self._max_characters = context, context * max(map(len, words), default=1)
        self._template: jinja2.Template | None = None
        self._reads: frozenset[str] = frozenset()
        self._problem = "--chat: the model has no chat template, so it was not trained for chats"
        source = template_in(folder)
        if source is not None:
            try:
                self._template, self._reads = _compiled(source, folder)
            except Exception as error:  # noqa: BLE001 - a template may be any text
                self._problem = f"the model's chat template cannot be compiled: {_one_line(error)}"

    def completion(self, body: bytes, name: str, max_tokens: int, *, chat: bool) -> dict[str, Any]:
        """Returns a client's request without its prompt, and the prompt's tokens."""
        completion = parse_request(body)
        if completion.model not in ("", name):
            named = printable(completion.model[:64])
            raise NoSuchModelError(f"model: {named} is not served here, only {name}")
        completion.request(max_tokens)
        content = completion.content(chat=chat, limit=self._context, reads=self._reads)
        options = replace(completion, prompt=None, messages=None)
        return {"request": asdict(options), "ids": self.tokens(content)}

    def tokens(self, prompt: str | Chat) -> list[int]:
        """Returns the tokens of a text, or of a chat as formatted by the model's template.

        Raises `UsageError` for a prompt that the model or its template does not accept.
        """
        parts = [prompt] if isinstance(prompt, str) else [t for m in prompt for t in m.values()]
        if any("\0" in part for part in parts):
            raise UsageError(
                "the prompt contains a NUL character, which is not text", hint="remove it"
            )
        text = prompt if isinstance(prompt, str) else self._rendered(prompt)
        if len(text) > self._max_characters:
            raise _too_long(f"{len(text):,} characters", self._context)
        # A chat template writes the special tokens itself.
        special = isinstance(prompt, str)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        if len(ids) >= self._context:
            raise _too_long(f"{len(ids):,} tokens", self._context)
        if not ids:
            raise UsageError("the prompt is empty", hint="write some text to continue")
        return ids

    def _rendered(self, messages: Chat) -> str:
        if self._template is None:
            raise UsageError(self._problem, hint="omit --chat: the model then continues the prompt")
        text = ""
        try:
            for piece in self._template.generate(messages=messages):
                text += piece
                if len(text) > self._max_characters:
                    break
        except Exception as cause:
            raise UsageError(
                f"the model's chat template does not accept these messages: {_one_line(cause)}",
                hint="if there is a system message, omit it: some templates do not support them",
            ) from cause
        return text


def _too_long(size: str, context: int) -> UsageError:
    return UsageError(
        f"the prompt has {size}, but the model's context has {context:,} tokens",
        hint="shorten the prompt",
    )


def _compiled(source: str, folder: Path) -> tuple[jinja2.Template, frozenset[str]]:
    """Returns a template, compiled as in `transformers`, and the names that it reads."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A block that marks the text that a model is trained on, and has no other effect."""

        tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    # A constant expression may run forever, so it is computed for a request, not during loading.
    environment.intercepted_binops = frozenset(environment.default_binop_table)
    environment.filters["tojson"] = to_json
    special = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in object_in(folder / TOKENIZER_CONFIG_FILE).items()
        if name.endswith("_token")
    }
    template = environment.from_string(
        source,
        globals={
            **{name: token for name, token in special.items() if isinstance(token, str)},
            "add_generation_prompt": True,
            "raise_exception": refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        },
    )
    tree = environment.parse(source)
    reads = {node.attr for node in tree.find_all(nodes.Getattr)}
    reads |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return template, frozenset(reads)


def _one_line(error: BaseException) -> str:
    """Returns an error's message in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MAX_MESSAGE]


def _answer(encoder: Encoder, header: Mapping[str, Any], body: bytes) -> bytes:
    try:
        if "name" in header:
            name, max_tokens = header["name"], header["most"]
            answer = encoder.completion(body, name, max_tokens, chat=header["chat"])
        else:
            answer = {"ids": encoder.tokens(json.loads(body))}
    except UsageError as error:
        unknown = isinstance(error, NoSuchModelError)
        answer = {"error": error.message, "hint": error.hint, "unknown": unknown}
    except MemoryError:
        answer = {}
    return json.dumps(answer).encode() + b"\n"


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def _answer_in_copy(encoder: Encoder, header: Mapping[str, Any], body: bytes) -> None:
    """Answers in a copy of this process; reports if that was killed after the time limit."""
    if sys.platform == "win32":  # Windows cannot fork
        _write(_answer(encoder, header, body))
        return
    copy = os.fork()
    if copy == 0:
        signal.alarm(header["seconds"])
        answer = _answer(encoder, header, body)
        signal.alarm(0)
        _write(answer)
        os._exit(0)
    _, status = os.waitpid(copy, 0)
    if status != 0:
        _write(b"{}\n")


NICE = 5
"""The nice value of this process, since generating text has priority over reading prompts."""


def main() -> None:
    """Answers requests on standard input until it is closed.

    A request is a line of JSON followed by a body, whose size is in the JSON.
    """
    if sys.platform != "win32":
        import resource

        os.nice(NICE)

        with contextlib.suppress(ValueError, OSError):  # a lower limit is already set
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    encoder = Encoder(Path(sys.argv[1]), int(sys.argv[2]))
    _write(b"{}\n")
    for line in sys.stdin.buffer:
        header = json.loads(line)
        body = sys.stdin.buffer.read(header["bytes"])
        _answer_in_copy(encoder, header, body)


if __name__ == "__main__":
    main()
