"""A process that makes the tokens of prompts, one line of JSON each; `prompts.py` starts it.

The chat template of a bundle is a program, and a pattern of its tokenizer may run for years. Both
run here, where they can be ended: the template in Jinja's sandbox, within a limit of memory.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, object_in, template_in

if TYPE_CHECKING:
    import jinja2

MEMORY_BYTES = 4 << 30
"""Of this process at most, where the system has such a limit; a large tokenizer takes 1 GB."""

MOST_WORDS = 300
"""Characters of a library's message that are passed on."""

Chat = Sequence[Mapping[str, str]]


class Encoder:
    """The tokenizer and the chat template of a folder, for a context of a number of tokens."""

    def __init__(self, folder: Path, context: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        # Settings for batches, which may be left in the file.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        words = self._tokenizer.get_vocab(with_added_tokens=True)
        self._most = context * max(map(len, words), default=1)
        self.reads: frozenset[str] = frozenset()
        self._template: jinja2.Template | None = None
        self._problem = ""
        source = template_in(folder)
        if source is not None:
            try:
                self._template, self.reads = _compiled(source, folder)
            except Exception as error:  # noqa: BLE001 - a template may be any text
                self._problem = f"it cannot be compiled: {_words(error)}"

    def answer(self, prompt: str | Chat) -> dict[str, Any]:
        """Returns `ids`, or why there are none: the template `refused`, a text is too `long`."""
        if isinstance(prompt, str):
            return self._encoded(prompt, special=True)
        if self._template is None:
            return {"refused": self._problem}
        try:
            text = self._rendered(prompt)
        except Exception as error:  # noqa: BLE001 - a program may raise any
            return {"refused": _words(error)}
        return self._encoded(text, special=False)  # the template writes the special tokens

    def _rendered(self, messages: Chat) -> str:
        assert self._template is not None
        text = ""
        for piece in self._template.generate(messages=messages):
            text += piece
            if len(text) > self._most:
                break
        return text

    def _encoded(self, text: str, *, special: bool) -> dict[str, Any]:
        if len(text) > self._most:
            return {"long": len(text)}
        return {"ids": self._tokenizer.encode(text, add_special_tokens=special).ids}


def _compiled(source: str, folder: Path) -> tuple[jinja2.Template, frozenset[str]]:
    """A template as `transformers` compiles one, and the names that it reads."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A block that only marks what a model is trained on."""

        tags = frozenset({"generation"})

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


def _words(error: BaseException) -> str:
    """What an error tells, in one line."""
    told = " ".join(str(error).split()) or type(error).__name__
    return told[:MOST_WORDS]


def _lines() -> Iterator[Any]:
    for line in sys.stdin.buffer:
        yield json.loads(line)


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answers lines of standard input until it ends."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # the system has no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    encoder = Encoder(Path(sys.argv[1]), int(sys.argv[2]))
    _say({"reads": sorted(encoder.reads)})
    for asked in _lines():
        if hasattr(signal, "alarm"):  # for a parent that was killed meanwhile
            signal.alarm(2 * asked["seconds"])
        _say(encoder.answer(asked["prompt"]))
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
