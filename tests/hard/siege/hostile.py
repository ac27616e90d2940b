"""Hostile clients of a server on this machine, bounded in number and time.

`python -m moexport.tests.hard.siege.hostile PORT SECONDS` sends what each kind of them sends, in
turn with a pause, and prints how many of each kind there were.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from threading import Thread

from moexport.plugins.text.tests.serving import CHATS, CONTEXT, PROMPT, head, opened, post, request

PAUSE_S = 0.2
"""Between two attacks of a kind."""

TEXTS = {
    "words": "the quick brown fox " * 2000,
    "one letter": "a" * 60_000,
    "spaces": " " * 60_000,
    "lines": "\n" * 60_000,
    "digits": "1234567890" * 6_000,
    "punctuation": "!?" * 30_000,
    "characters of China": "\u4e2d" * 60_000,
    "combining": "e\u0301" * 30_000,
    "spaces and an end": " " * 59_999 + "x",
    "faces": "\U0001f642" * 30_000,
}
"""What patterns of pretokenizers are slow on, or recurse for each character of."""


def bodies(port: int, count: int) -> None:
    """Bodies that are large, of many values, or of none."""
    match count % 5:
        case 0:
            post(port, b'{"prompt": "' + b"x" * (32 << 20) + b'"}')
        case 1:
            post(port, b'{"prompt": [' + b"{}," * 340_000 + b"{}]}")
        case 2:
            post(port, b"[" * 500_000)
        case 3:
            chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            with opened(port, chunked) as connection:
                for _ in range(64):
                    connection.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        case _:
            post(port, b"\xff\x00" * 200_000)


def keys(port: int, count: int) -> None:
    """A message of many keys, or a chat of many messages."""
    said = {"role": "user", "content": "x", **{f"{key:x}": count for key in range(80_000)}}
    many = [{"role": "user", "content": ""}] * 25_000
    post(port, {"messages": [said] if count % 2 else many, "max_tokens": 1}, CHATS)


def prompts(port: int, count: int) -> None:
    """Long prompts of one kind of character, within the limit of a context and beyond it."""
    text = [*TEXTS.values()][count % len(TEXTS)]
    post(port, {"prompt": text[: (CONTEXT, len(text))[count % 2]], "max_tokens": 1})


def stops(port: int, count: int) -> None:
    """A long text whose every piece may begin a text to stop at."""
    stop = [letter * 255 + "!" for letter in "abcdefgh"]
    asked = {"prompt": PROMPT, "max_tokens": 1000, "stop": stop, "stream": bool(count % 2)}
    post(port, asked)


def hang_ups(port: int, count: int) -> None:
    """Clients that ask for the longest text and leave."""
    asked = request({"prompt": PROMPT, "max_tokens": CONTEXT - 8, "stream": bool(count % 2)})
    clients = [opened(port, asked) for _ in range(8)]
    time.sleep(0.01 * (count % 10))
    for client in clients:
        client.close()


def half_heads(port: int, count: int) -> None:
    """Requests of which only a part comes."""
    part = head(1000)[: 30 + count % 50] if count % 2 else head(1000) + b"{"
    clients = [opened(port, part) for _ in range(300)]
    time.sleep(2)
    for client in clients:
        client.close()


def deaf(port: int, count: int) -> None:
    """A client that reads nothing of its stream."""
    with opened(port, request({"prompt": PROMPT, "max_tokens": 500, "stream": True})):
        time.sleep(1 + count % 3)


def refused(port: int, count: int) -> None:
    """What is not served, or not by HTTP."""
    post(port, {"prompt": PROMPT, ("echo", "tools", "n", "response_format")[count % 4]: [2]})
    post(port, {"prompt": PROMPT}, Host="evil.example")
    with opened(port, b"\x16\x03\x01" + bytes(range(256)) * 8) as connection:
        connection.recv(16)


KINDS = (bodies, keys, prompts, stops, hang_ups, half_heads, deaf, refused)


def attack(kind: Callable[[int, int], None], port: int, end: float, done: Counter[str]) -> None:
    """Sends what one kind of client sends, until a time."""
    count = 0
    while time.monotonic() < end:
        # The server may close a connection at any time, also before it is read from.
        with contextlib.suppress(OSError, http.client.HTTPException):
            kind(port, count)
        count += 1
        done[kind.__name__] = count
        time.sleep(PAUSE_S)


def main() -> None:
    """Attacks with all kinds at once."""
    if hasattr(os, "nice"):
        os.nice(10)  # hostile clients have machines of their own
    port, seconds = int(sys.argv[1]), float(sys.argv[2])
    end = time.monotonic() + seconds
    done: Counter[str] = Counter()
    threads = [Thread(target=attack, args=(kind, port, end, done)) for kind in KINDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(done))


if __name__ == "__main__":
    main()
