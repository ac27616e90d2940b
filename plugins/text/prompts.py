"""Tokenises prompts in a separate process (`encoder.py`) within a time limit.

The time that Hugging Face's `tokenizers` needs grows with the length of a text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from ...common.documents import from_data
from ...common.environment import python_environment
from ...common.libraries import library
from ...errors import BundleError, EngineError, UsageError, install
from .server.protocol import CompletionRequest, NoSuchModelError

ENCODER = "moexport.plugins.text.encoder"

LOADING_S = 60
"""The time limit for loading a tokenizer; one with 200,000 words takes two seconds."""

LIMIT_S = 10
"""The time limit for tokenising a prompt, to which each MiB adds a second."""

CLOSING_S = 5
"""The extra time after which the process is killed, if it has not killed its own copy."""


class Prompts:
    """Tokenises prompts with the tokenizer in a bundle's folder; `context` limits their tokens.

    Raises `MissingExtraError` without `tokenizers` and Jinja, and `BundleError` for a tokenizer
    that cannot be loaded.
    """

    def __init__(self, folder: Path, context: int) -> None:
        for package in ("jinja2", "tokenizers"):
            library(package, f"tokenising a prompt needs {package}", install("generate"))
        self._folder, self._context = folder, context
        self._lock = Lock()
        self._start()

    def tokens(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the tokens of a text, or of a chat as formatted by the model's template.

        Raises `UsageError` for a prompt that the model does not accept, and `EngineError` if it
        takes too long.
        """
        ids: list[int] = self._request({}, json.dumps(prompt).encode())["ids"]
        return ids

    def completion(
        self, body: bytes, name: str, max_tokens: int, *, chat: bool
    ) -> tuple[CompletionRequest, list[int]]:
        """Returns a client's request and the tokens of its prompt.

        A text has at most `max_tokens` tokens. Raises as `tokens` does, and `NoSuchModelError`.
        """
        reply = self._request({"name": name, "most": max_tokens, "chat": chat}, body)
        return from_data(CompletionRequest, reply["request"], "the request"), reply["ids"]

    def _request(self, header: Mapping[str, Any], body: bytes) -> Any:
        seconds = LIMIT_S + (len(body) >> 20)
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            line = json.dumps({**header, "bytes": len(body), "seconds": seconds}).encode()
            answer = self._answer(line + b"\n" + body, seconds + CLOSING_S)
        if not answer:
            raise EngineError(
                f"{self._folder}: a prompt was not tokenised within {seconds} s and 4 GB of memory",
                hint="a pattern in tokenizer.json or the chat template may run forever",
            )
        if "error" in answer:
            kind = NoSuchModelError if answer["unknown"] else UsageError
            raise kind(answer["error"], hint=answer["hint"])
        return answer

    def _start(self) -> None:
        """Starts the process, and waits until it has loaded the tokenizer."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", ENCODER, str(self._folder.absolute()), str(self._context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=python_environment(TOKENIZERS_PARALLELISM="false"),
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )
        self._end = weakref.finalize(self, _stop_process, self._process)
        if self._answer(b"", LOADING_S) is None:
            raise BundleError(
                f"{self._folder}: its tokenizer.json cannot be loaded",
                hint="save the tokenizer with a current version of transformers and export again",
            )

    def _answer(self, request: bytes, seconds: int) -> Any:
        """Returns the process's answer, or None if it ends or is killed after a time limit."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(request)
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


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
