"""`serve` refuses, limits and frees what it should, and logs it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moexport.plugins.text.tests.serving import (
    CHATS,
    COMPLETIONS,
    CONTEXT,
    PROMPT,
    Server,
    get,
    head,
    opened,
    post,
    request,
    sent,
    with_template,
)
from moexport.tests.command import run
from moexport.tests.exporter.bundle.test_bundle import rehash

pytest.importorskip("uvicorn", reason="the extra generate is not installed")

PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]


@pytest.fixture(scope="module")
def server(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(out, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize(
    "given",
    [
        *({name: True} for name in ("echo", "logprobs", "n", "best_of", "anything_else")),
        {"logprobs": 0},
        {"frequency_penalty": 1},
        {"presence_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"logit_bias": {"5": 1}},
        {"suffix": "x"},
        {"stop": ["x"] * 9},
        {"stop": "x" * 257},
        {"stop": ""},
        {"max_tokens": CONTEXT + 1},
        {"max_tokens": 0},
        {"max_completion_tokens": 0},
        {"max_tokens": True},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1e-46},
        {"top_k": 0},
        {"seed": 2**31},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2]},
        {"messages": []},
    ],
    ids=lambda given: json.dumps(given)[:40],
)
def test_an_unsupported_field_is_refused_by_its_name(server: Server, given: dict[str, Any]) -> None:
    answer = post(server.port, {"prompt": PROMPT, "max_tokens": 1, **given})
    assert answer.status == 400
    (name,) = given
    assert name in answer.error and "--" not in answer.error


def test_values_that_request_nothing_are_ignored(server: Server) -> None:
    given = {
        **{"n": 1, "best_of": 1, "echo": False, "logprobs": None, "frequency_penalty": 0.0},
        **{"presence_penalty": 0, "response_format": {"type": "text"}, "tools": [], "user": "x"},
        **{"logit_bias": {}, "stop": None, "suffix": None, "stream": None, "metadata": {"a": "b"}},
    }
    answer = post(server.port, {"prompt": PROMPT, "max_tokens": 2, **given})
    assert answer.status == 200, answer.text


def test_the_likeliest_tokens_are_drawn_from(server: Server) -> None:
    """`top_k` is not in the protocol, and may be larger than the vocabulary."""
    greedy = post(server.port, {"prompt": PROMPT, "max_tokens": 8}).said
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 2.0, "seed": 1}
    assert post(server.port, {**asked, "top_k": 1}).said == greedy
    assert post(server.port, {**asked, "top_k": 10**6}).said != greedy
    assert post(server.port, {**asked, "temperature": 1e-46}).said == greedy  # 0 in 32 bits


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": 5}, "messages[0].content: it must be text"),
        ({"role": "user", "content": True}, "messages[0].content: it must be text"),
        ({"role": "user", "content": {"a": 1}}, "messages[0].content: it must be text"),
        ({"role": "user", "content": [["x"]]}, "messages[0].content: a part is not text"),
        ({"role": "user", "content": [{"text": 5}]}, "messages[0].content: a part is not text"),
        ({"role": 5, "content": "x"}, "messages[0].role: it must be text"),
        ({"content": "x"}, "messages[0].role: it must be text"),
        ({"role": "user", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls: "),
        ({"role": "user", "content": "x", "name": "me"}, "messages[0].name: "),
        ({"role": "user", "content": "x\0y"}, "the prompt contains a NUL character"),
    ],
)
def test_a_message_is_text(server: Server, message: dict[str, Any], problem: str) -> None:
    answer = post(server.port, {"messages": [message], "max_tokens": 1}, CHATS)
    assert answer.status == 400 and answer.error.startswith(problem)


def test_a_message_may_be_in_parts_and_have_empty_fields(server: Server) -> None:
    texts = {
        json.loads(post(server.port, {"messages": [said], "max_tokens": 8}, CHATS).text)["choices"][
            0
        ]["message"]["content"]
        for said in (
            {"role": "user", "content": "hi"},
            {"role": "user", "content": PARTS, "tool_calls": None, "annotations": []},
        )
    }
    assert len(texts) == 1


@pytest.mark.slow
def test_a_template_gets_only_the_fields_that_it_names(out: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.name }}{{ m['mood'] }}{% endfor %}"
    with Server(with_template(out, tmp_path / "bundle", template), tmp_path) as server:
        said = {"role": "user", "content": "The ", "name": "gra", "mood": "ph"}
        answer = post(server.port, {"messages": [said], "max_tokens": 8}, CHATS)
        text = json.loads(answer.text)["choices"][0]["message"]["content"]
        assert text == post(server.port, {"prompt": PROMPT, "max_tokens": 8}).said
        answer = post(server.port, {"messages": [{**said, "other": "x"}]}, CHATS)
        assert answer.status == 400 and answer.error.startswith("messages[0].other: ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x"',
        json.dumps({"k" * 900_000: 1}).encode(),
        json.dumps({"prompt": "x" * 900_000}).encode(),
        json.dumps({"prompt": [{}] * 200_000}).encode(),
    ],
    ids=lambda body: body[:24].decode(errors="replace"),
)
def test_a_body_that_is_no_request_is_refused_at_once(server: Server, body: bytes) -> None:
    before = server.memory()
    answer = post(server.port, body)
    assert answer.status == 400 and len(answer.error) < 400
    assert answer.seconds < 5
    assert server.memory() < before + 16


def test_200000_keys_of_a_message_are_refused_at_once(server: Server) -> None:
    keys = {f"{key:x}": 0 for key in range(90_000)}
    said = [{"role": "user", "content": "x", **keys}]
    answer = post(server.port, {"messages": said, "max_tokens": 1}, CHATS)
    assert answer.status == 400 and "this server does not support the field" in answer.error
    assert answer.seconds < 5
    many = [{"role": "user", "content": ""}] * (CONTEXT + 1)
    answer = post(server.port, {"messages": many}, CHATS)
    assert answer.error == "messages: 4,097, but only 4,096 tokens fit"


def test_a_large_body_is_not_read(server: Server) -> None:
    before = server.memory()
    answer = post(server.port, b'{"prompt": "' + b"x" * (8 << 20) + b'"}')
    assert answer.status == 413
    with opened(server.port, head(1 << 40)) as connection:
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")
    chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with opened(server.port, chunked) as connection:
        for _ in range(3):
            connection.sendall(b"80000\r\n" + b"x" * (1 << 19) + b"\r\n")
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")
    assert server.memory() < before + 16


def test_a_prompt_may_fill_the_context_but_for_one_token(server: Server) -> None:
    tokens = json.loads(post(server.port, {"prompt": "0" * 100, "max_tokens": 1}).text)["usage"]
    assert tokens["prompt_tokens"] == 100
    full = {"prompt": "0" * (CONTEXT - 1), "max_tokens": 9}
    answer = json.loads(post(server.port, full).text)
    assert answer["usage"]["completion_tokens"] == 1
    assert post(server.port, {"prompt": "0" * CONTEXT}).status == 400


def test_only_a_page_of_this_machine_may_send_requests(server: Server) -> None:
    asked = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    names = {"Host": "evil.example"}, {"Host": "localhost.evil.example:80"}
    assert [post(server.port, asked, **each).status for each in names] == [400, 400]
    assert sent(server.port, "GET", "/v1/models", headers=names[0]).status == 400
    for origin, status in {
        "https://evil.example": 403,
        "null": 403,
        "http://[": 403,
        "http://localhost:3000": 200,
        "http://127.0.0.1": 200,
        "http://[::1]:80": 200,
    }.items():
        assert post(server.port, asked, Origin=origin).status == status, origin
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert post(server.port, asked, **{"Content-Type": kind}).status == 415
    assert sent(server.port, "POST", COMPLETIONS, asked).status == 415
    kind = "application/json; charset=utf-8"
    assert post(server.port, asked, **{"Content-Type": kind}).status == 200


@pytest.mark.slow
def test_an_error_reveals_nothing_of_the_server(out: Path, tmp_path: Path, server: Server) -> None:
    bundle = with_template(out, tmp_path / "bundle", "{{ raise_exception('roles ' ~ 1) }}")
    said = {"messages": [{"role": "user", "content": "x"}]}
    with Server(bundle, tmp_path) as other:
        answer = post(other.port, said, CHATS)
        assert answer.status == 400
        assert answer.error == "the model's chat template does not accept these messages: roles 1"
    answers = [
        sent(server.port, "GET", "/nowhere"),
        sent(server.port, "PUT", COMPLETIONS),
        post(server.port, {"prompt": "x", "model": "m" * 1000}),
        post(server.port, {"prompt": "x"}, CHATS),
    ]
    assert [answer.status for answer in answers] == [404, 405, 404, 400]
    for answer in answers:
        assert not re.search(r"/\w+/|--|\.py|Traceback", answer.error), answer.error
        assert len(answer.error) < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "status"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 500),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", 400),
        ("{{ 'x' * 10 ** 11 }}", 400),
        ("{{ 9 ** (9 ** 9) }}", 500),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", 400),
        ("{% set n = namespace(a=1) %}{% set n.a = n %}{{ n.a.a.a.b.c }}", 400),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", 400),
        ("{% include 'other' %}", 400),
        ("{{ messages.append(1) }}", 400),
        ("{% for m in messages %}", 400),
    ],
)
def test_a_template_that_never_ends_is_ended(
    template: str, status: int, out: Path, tmp_path: Path
) -> None:
    bundle = with_template(out, tmp_path / "bundle", template)
    with Server(bundle, tmp_path) as server:
        before = server.memory()
        answer = post(server.port, {"messages": [{"role": "user", "content": "x"}]}, CHATS)
        assert answer.status == status, answer.text
        assert answer.seconds < 30
        assert post(server.port, {"prompt": PROMPT, "max_tokens": 1}).status == 200
        assert server.memory() < before + 16
        assert "Traceback" not in server.log.read_text()


def test_clients_that_leave_free_their_caches_at_once(server: Server) -> None:
    post(server.port, {"prompt": PROMPT, "max_tokens": 8})
    before = server.memory()
    for stream in (True, False):
        asked = request({"prompt": PROMPT, "max_tokens": CONTEXT - 8, "stream": stream})
        clients = [opened(server.port, asked) for _ in range(30)]
        wait_until(lambda: texts(server) == 30)
        wait_until(lambda: server.memory() > before + 15)
        for client in clients:
            client.close()
        wait_until(lambda: texts(server) == 0)
        wait_until(lambda: server.memory() < before * 1.1)


def test_more_than_64_texts_at_once_get_a_503(server: Server) -> None:
    asked = request({"prompt": PROMPT, "max_tokens": CONTEXT - 8, "stream": True})
    clients = [opened(server.port, asked) for _ in range(64)]
    wait_until(lambda: texts(server) == 64)
    answer = post(server.port, {"prompt": PROMPT})
    assert answer.status == 503 and answer.headers["retry-after"] == "1"
    assert get(server.port, "/health").status == 200
    for client in clients:
        client.close()
    wait_until(lambda: texts(server) == 0)


def test_a_text_that_is_held_back_delays_no_other(server: Server) -> None:
    text = post(server.port, {"prompt": PROMPT, "max_tokens": 200}).said
    asked = {"prompt": PROMPT, "max_tokens": CONTEXT - 8, "stop": [text[:200] + "never said"]}
    clients = [opened(server.port, request(asked)) for _ in range(4)]
    wait_until(lambda: texts(server) == 4)
    answer = post(server.port, {"prompt": PROMPT, "max_tokens": 8})
    assert text.startswith(answer.said)
    assert texts(server) == 4
    for client in clients:
        client.close()


def test_half_sent_requests_block_nobody(server: Server) -> None:
    lines = server.log.read_text().count("\n")
    halves = [opened(server.port, head(100)[:40]) for _ in range(300)]
    halves += [opened(server.port, head(100) + b"{") for _ in range(300)]
    assert post(server.port, {"prompt": PROMPT, "max_tokens": 1}).status == 200
    for half in halves:
        half.close()
    wait_until(lambda: post(server.port, {"prompt": PROMPT, "max_tokens": 1}).status == 200)
    assert server.log.read_text().count("\n") < lines + 400


@pytest.mark.slow
def test_a_request_that_is_never_completed_is_ended(server: Server) -> None:
    for content in (b"", head(100)[:40], head(100) + b"{"):
        with opened(server.port, content) as connection:
            begun = time.monotonic()
            connection.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(10) == b""
            assert time.monotonic() - begun < 30


@pytest.mark.slow
def test_a_cache_that_does_not_fit_is_reported_with_its_size(out: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(out, bundle)
    config = json.loads((bundle / "genai_config.json").read_text())
    config["model"]["context_length"] = 2**31 - 1
    (bundle / "genai_config.json").write_text(json.dumps(config))
    rehash(bundle, "genai_config.json")
    many = ("--max-tokens", str(2**31 - 1))
    done = run("generate", bundle, PROMPT, *many)
    assert done.code == 1
    assert done.error.startswith(
        "there is not enough memory for the cache of 2,147,483,647 tokens: it needs 5"
    )
    assert "--context" in done.hint
    assert (
        run("generate", bundle, PROMPT, "--max-tokens", str(2**31 - 1), "--context", "16").code == 0
    )
    with Server(bundle, tmp_path, "--max-tokens", str(2**31 - 1)) as server:
        answer = post(server.port, {"prompt": PROMPT})
        assert answer.status == 503 and "2,147,483,647 tokens" in answer.error
        assert post(server.port, {"prompt": PROMPT, "max_tokens": 2}).status == 200


@pytest.mark.slow
def test_each_request_is_logged_in_one_line_and_counted(out: Path, tmp_path: Path) -> None:
    with Server(out, tmp_path) as server:
        assert json.loads(get(server.port, "/health").text) == {"status": "ok", "model": "mixtral"}
        post(server.port, {"prompt": PROMPT, "max_tokens": 3})
        post(server.port, {"prompt": PROMPT, "max_tokens": 2, "stream": True})
        post(server.port, {"prompt": PROMPT, "n": 2})
        get(server.port, "/%1b[31m\n"[:-1])
        counts = get(server.port, "/metrics").text.splitlines()
        get(server.port, "/metrics")
        log = server.log.read_text()
    assert 'moexport_requests_total{path="/v1/completions",status="200"} 2' in counts
    assert 'moexport_requests_total{path="/v1/completions",status="400"} 1' in counts
    assert 'moexport_requests_total{path="other",status="404"} 1' in counts
    assert "moexport_prompt_tokens_total 14" in counts
    assert "moexport_generated_tokens_total 5" in counts
    assert "moexport_texts 0" in counts
    lines = re.findall(r" 127\.0\.0\.1 (.*) \d+\.\d+ s\n", log)
    assert (
        lines
        == [
            "GET /health 200",
            "POST /v1/completions 200 7+3 tokens",
            "POST /v1/completions 200 7+2 tokens",
            "POST /v1/completions 400",
            "GET other 404",
            "GET /metrics 200",
            "GET /metrics 200",
        ][: len(lines)]
    )
    assert len(lines) > 5
    assert "\x1b" not in log


@pytest.mark.slow
def test_a_server_ends_before_its_texts_are_complete(out: Path, tmp_path: Path) -> None:
    with Server(out, tmp_path) as server:
        asked = request({"prompt": PROMPT, "max_tokens": CONTEXT - 8, "stream": True})
        clients = [opened(server.port, asked) for _ in range(8)]
        wait_until(lambda: texts(server) == 8)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(20)
        written = [rest(client) for client in clients]
    assert all(written) and not any(b"[DONE]" in each for each in written)
    assert "Traceback" not in server.log.read_text()


def rest(client: socket.socket) -> bytes:
    """Returns everything that a client received until its connection ended."""
    found = b""
    with client, contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            found += part
    return found


def texts(server: Server) -> int:
    """Returns how many texts are being generated."""
    found = re.search(r"^moexport_texts (\d+)$", get(server.port, "/metrics").text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    """Waits for a condition that is soon true, or later on a busy machine."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
