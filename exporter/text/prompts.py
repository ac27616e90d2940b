"""The tokens of prompts, which a process of their own makes: it is ended where it takes too long.

Hugging Face's `tokenizers` take a time that grows with the length of a text, whatever the text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from ...errors import BundleError, EngineError, MissingExtraError, UsageError, install

ENCODER = "moexport.exporter.text.encoder"

LOADING_S = 60
"""For a tokenizer to be loaded: one of 200,000 words takes two seconds."""

LIMIT_S = 10
"""For the tokens of a prompt, and a second more for each MiB of it."""


class Prompts:
    """Makes the tokens of prompts for a bundle's folder and a context of a number of tokens.

    Raises `MissingExtraError` without `tokenizers` and Jinja, and `BundleError` for a tokenizer
    that cannot be loaded.
    """

    def __init__(self, folder: Path, context: int) -> None:
        check_installed()
        self._folder, self._context = folder, context
        self._lock = Lock()
        self._start()

    def ids(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the tokens of a text, or of a chat as the model's template writes it.

        Raises `UsageError` for a prompt that the model does not take, and `EngineError` where the
        tokens are not made in time.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            seconds = LIMIT_S + (sum(map(len, _texts(prompt))) >> 20)
            answer = self._answer({"prompt": prompt, "seconds": seconds}, seconds)
        if answer is None:
            raise EngineError(
                f"{self._folder}: the tokens of a prompt were not made within {seconds} s and 4 GB",
                hint="a pattern of tokenizer.json or the chat template does not end",
            )
        if "refused" in answer:
            raise UsageError(
                f"the model's chat template does not take these messages: {answer['refused']}",
                hint="leave --system out: some templates have no system messages",
            )
        if "long" in answer:
            raise UsageError(
                f"the prompt has {answer['long']:,} characters, and the model's context holds "
                f"{self._context:,} tokens",
                hint="shorten the prompt",
            )
        ids: list[int] = answer["ids"]
        return ids

    def _start(self) -> None:
        """Starts the process, and waits until it has loaded the tokenizer."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-m", ENCODER, str(self._folder.absolute()), str(self._context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # a Ctrl-C reaches this process alone
        )
        self._end = weakref.finalize(self, _end, self._process)
        answer = self._answer(None, LOADING_S)
        if answer is None:
            raise BundleError(
                f"{self._folder}: its tokenizer.json cannot be loaded",
                hint="save the tokenizer with a current transformers, and export again",
            )
        self.reads = frozenset(answer["reads"])
        """The names that the chat template reads, of messages among others."""

    def _answer(self, asked: Mapping[str, Any] | None, seconds: int) -> Any:
        """What the process answers; None where it ends, or is ended after a time."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            if asked is not None:
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        self._end()
        return None


def check_installed() -> None:
    """Raises `MissingExtraError` where the libraries of prompts are not installed."""
    try:
        import jinja2  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"what makes tokens of text is not installed ({error})", hint=install("generate")
        ) from error


def _texts(prompt: str | Sequence[Mapping[str, str]]) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [text for message in prompt for text in message.values()]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
