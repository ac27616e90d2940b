"""Starts the real server as a program, and sends it valid and invalid requests."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from moexport.tests.command import PROGRAM
from moexport.tests.exporter.bundle.test_bundle import rehash

PROMPT = "The graph"
CONTEXT = 4096
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """A client's answer, and its time."""

    status: int
    text: str
    seconds: float
    headers: Mapping[str, str]

    @property
    def error(self) -> str:
        """Returns the message of an error."""
        return str(json.loads(self.text)["error"]["message"])

    @property
    def said(self) -> str:
        """Returns the text of a completion."""
        return str(json.loads(self.text)["choices"][0]["text"])


def post(
    port: int, asked: bytes | Mapping[str, Any], path: str = COMPLETIONS, **headers: str
) -> Answer:
    """Sends a request, and reads the whole answer."""
    body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    return sent(port, "POST", path, body, {**JSON, **headers})


def get(port: int, path: str) -> Answer:
    """Reads a page."""
    return sent(port, "GET", path)


def sent(
    port: int, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
) -> Answer:
    """Sends anything by HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    begun = time.perf_counter()
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    return Answer(answer.status, text, time.perf_counter() - begun, dict(answer.headers))


def opened(port: int, content: bytes) -> socket.socket:
    """Sends some bytes without reading an answer."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(content)
    return connection


def head(length: int, path: str = COMPLETIONS) -> bytes:
    """Returns the head of a request for a body of this length."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def request(asked: Mapping[str, Any]) -> bytes:
    """Returns a whole request."""
    body = json.dumps(asked).encode()
    return head(len(body)) + body


class Server:
    """`moexport serve` with a bundle and its log in a file; the end of the context stops it."""

    def __init__(self, bundle: Path, folder: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port: int = found.getsockname()[1]
        self.log = folder / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *PROGRAM,
                    "serve",
                    bundle,
                    "--port",
                    str(self.port),
                    "--name",
                    "mixtral",
                    *options,
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def __enter__(self) -> Server:
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.1)
        raise TimeoutError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def memory(self) -> float:
        """Returns the memory of the server and its tokenising process in MiB, without copies."""
        (server,) = psutil.Process(self.process.pid).children()  # the first one passes signals on
        held = [each.memory_info().rss for each in (server, *server.children())]
        return sum(held) / 2**20


def with_tokenizer(bundle: Path, place: Path, **changed: Any) -> Path:
    """Copies a bundle with changes to `tokenizer.json`, including its hash."""
    shutil.copytree(bundle, place)
    file = place / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    rehash(place, file.name)
    return place


def with_template(bundle: Path, place: Path, template: str) -> Path:
    """Copies a bundle with another chat template, including its hash."""
    shutil.copytree(bundle, place)
    (place / "chat_template.jinja").write_text(template)
    rehash(place, "chat_template.jinja")
    return place
