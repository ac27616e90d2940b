"""Text from a bundle: `generate` in a shell and in Python, and `serve` with OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moexport
import pytest
from moexport.errors import BundleError, UsageError
from moexport.plugins.text.generate import PROMPT_TOKENS
from moexport.plugins.text.tests.serving import CONTEXT, PROMPT, Server
from moexport.plugins.text.tests.test_generation import END, PROMPTS, greedy, text_model
from moexport.plugins.token_routed.tests.architectures import transformers
from moexport.tests.command import PROGRAM, run, start
from moexport.tests.docs.documents import SITE, blocks, lines
from moexport.tests.recorded import DATA

AutoTokenizer: Any = transformers.AutoTokenizer
openai: Any = pytest.importorskip("openai", reason="the client comes with the extra dev")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> str:
    """The text that transformers generates."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="np")["input_ids"][0]
    return str(tokenizer.decode(greedy("mixtral", folder, ids)))


@pytest.mark.path
def test_generate_continues_a_prompt_as_transformers_does(out: Path, wanted: str) -> None:
    done = run("generate", out, PROMPT, "--max-tokens", "24", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["text"] == wanted
    assert (found["finish"], found["tokens"]) == ("length", 24)
    assert found["prompt_tokens"] > 2 and found["tokens_per_second"] > 0


def test_generate_prints_the_text_and_then_the_rate(
    out: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    done = run("generate", out, "--max-tokens", "24")
    assert done.code == 0 and " tokens/s" in done.err, done.err
    assert done.out == f"{wanted}\n"
    assert "".join(moexport.generate(out, PROMPT, max_tokens=24)) == wanted


def test_a_text_ends_before_one_to_stop_at_wherever_its_pieces_end(out: Path) -> None:
    text = "".join(moexport.generate(out, PROMPT, max_tokens=24))
    for stop in (text[5:9], text[3], text[10:]):
        found = moexport.generate(out, PROMPT, max_tokens=24, stop=["never said", stop])
        pieces = list(found)
        assert "".join(pieces) == text[: text.index(stop)]
        assert all(pieces) and found.finish == "stop"
    begun = moexport.generate(out, PROMPT, max_tokens=24, stop=[text[-1] + "never said"])
    assert "".join(begun) == text


def test_a_seed_draws_the_same_tokens(out: Path) -> None:
    texts = [
        "".join(moexport.generate(out, PROMPT, max_tokens=16, seed=seed, temperature=1.5))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    greedy = "".join(moexport.generate(out, PROMPT, max_tokens=16))
    for given in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6, "seed": 3}):
        assert "".join(moexport.generate(out, PROMPT, max_tokens=16, **given)) == greedy


def test_a_chat_is_what_its_template_writes(out: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    plain = "".join(moexport.generate(out, "<system> Be brief.\n<user> hi\n", max_tokens=8))
    assert "".join(moexport.generate(out, said, chat=True, max_tokens=8)) == plain
    done = run("generate", out, "hi", "--chat", "--system", "Be brief.", *("--max-tokens", "8"))
    assert done.code == 0, done.err
    assert "".join(moexport.generate(out, "hi", chat=True, max_tokens=8)) != plain


@pytest.mark.slow
@pytest.mark.parametrize(("name", "second"), [("mixtral", True), ("gpt_oss", False)])
def test_a_prompt_computed_in_parts_is_continued_as_by_transformers(
    name: str, second: bool, tmp_path: Path
) -> None:
    """This includes sliding windows, which span several parts; the other graph copies its cache."""
    folder = text_model(name, tmp_path / "model", second=second, max_position_embeddings=512)
    prompt = "0123456789abcde\n" * 20
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="np")["input_ids"][0]
    assert 2 * PROMPT_TOKENS < len(ids) < 488
    wanted = greedy(name, folder, ids)
    wanted = wanted[: wanted.index(END)] if END in wanted else wanted
    for target in ("ort-cpu", "onnx"):
        bundle = moexport.export(
            moexport.load(folder), tmp_path / target, target=target, verify=False
        )
        text = "".join(moexport.generate(bundle, prompt, max_tokens=24, temperature=0.0))
        # A character that the last token only begins is left out.
        assert text == AutoTokenizer.from_pretrained(folder).decode(wanted).rstrip("\ufffd")


def test_an_interrupt_ends_the_text_with_its_statistics(out: Path) -> None:
    process = start("generate", out, PROMPT, "--max-tokens", str(CONTEXT))
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert " generated at " in err and "Traceback" not in err


@pytest.mark.slow
def test_the_page_goes_from_a_folder_to_a_chat_in_three_commands(
    folder: Path, tmp_path: Path
) -> None:
    first = blocks(SITE["text.md"])[0]
    install, export, chat = lines(first)
    assert install == "pip install '.[cpu,transformers,generate]'"
    names = {"FOLDER": str(folder), "BUNDLE": str(tmp_path / "BUNDLE")}
    to_export, to_chat = (
        [names.get(word, word) for word in command.split()[1:]] for command in (export, chat)
    )
    assert run(*to_export).code == 0
    ours, theirs = pty.openpty()
    chatting = subprocess.Popen(
        [*PROGRAM, *to_chat, "--max-tokens", "8"], stdin=theirs, stdout=theirs
    )
    os.close(theirs)
    os.write(ours, b"hi\nand then?\n\x04")
    said = b""
    with contextlib.suppress(OSError):  # which the end of the program is here
        while part := os.read(ours, 1024):
            said += part
    assert chatting.wait(timeout=60) == 0
    os.close(ours)
    wanted = "".join(moexport.generate(tmp_path / "BUNDLE", "hi", chat=True, max_tokens=8))
    assert wanted in said.decode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), "--temperature -1.0: it must be 0 or more"),
        (("--top-p", "0"), "--top-p 0.0: it must be above 0 and at most 1"),
        (("--top-k", "0"), "--top-k 0: it must be 1 or more"),
        (("--max-tokens", "0"), "--max-tokens 0: it must be 1 or more"),
        (("--seed", "-1"), "--seed -1: it must be from 0 to 2147483647"),
        (("--system", "x"), "--system: only a chat has a system message"),
        (("--stop", ""), "--stop: the text is empty"),
    ],
)
def test_a_wrong_value_is_refused_with_a_message(
    out: Path, options: tuple[str, ...], message: str
) -> None:
    done = run("generate", out, PROMPT, *options)
    assert (done.code, done.error) == (2, message)


def test_a_prompt_longer_than_the_context_is_refused(out: Path) -> None:
    done = run("generate", out, "x " * CONTEXT)
    assert done.code == 2 and "but the model's context has 4,096" in done.error
    with pytest.raises(UsageError, match="the prompt is empty"):
        moexport.generate(out, "")


def test_a_bundle_that_cannot_generate_is_refused_with_a_reason(
    out: Path, folder: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(out, changed)
    (changed / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json: the content has changed"):
        moexport.generate(changed, PROMPT)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "chat_template.jinja").unlink()
    model = moexport.load(bare)
    moexport.export(model, tmp_path / "no-template", verify=False)
    with pytest.raises(UsageError, match="has no chat template"):
        moexport.generate(tmp_path / "no-template", PROMPT, chat=True)
    words = AutoTokenizer.from_pretrained(bare)
    words.add_tokens([f"<{number}>" for number in range(40)])
    words.save_pretrained(str(tmp_path / "other"))
    other = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    (bare / "tokenizer.json").write_text(json.dumps(other))
    moexport.export(model, tmp_path / "other-words", verify=False)
    done = run("generate", tmp_path / "other-words", PROMPT)
    assert done.code == 1 and done.error.endswith(
        "to a different model: it has the token 339, but this model's vocabulary ends at 303"
    )
    (bare / "tokenizer.json").unlink()
    moexport.export(model, tmp_path / "no-tokenizer", verify=False)
    done = run("generate", tmp_path / "no-tokenizer", PROMPT)
    assert done.code == 1 and done.error.endswith(" has no tokenizer.json")
    image = run("generate", DATA / "bundle_0_1_0", PROMPT)
    assert image.code == 1 and "no language model with a cache" in image.error
    served = run("serve", DATA / "bundle_0_1_0")
    assert served.code == 1 and "no language model with a cache" in served.error
    assert "serving" not in served.err


@pytest.fixture(scope="module")
def served(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Server(out, tmp_path_factory.mktemp("served")) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


@pytest.mark.slow
def test_a_client_of_openai_gets_the_same_text(served: str, wanted: str) -> None:
    client = openai.OpenAI(base_url=served, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["mixtral"]
    asked = {"model": "mixtral", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(prompt=PROMPT, **asked)
    assert plain.choices[0].text == wanted
    assert plain.choices[0].finish_reason == "length" and plain.usage.completion_tokens == 24
    parts = client.completions.create(prompt=PROMPT, stream=True, **asked)
    assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text
    said = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(messages=said, **asked).choices[0].message.content
    parts = client.chat.completions.create(messages=said, stream=True, **asked)
    deltas = (part.choices[0].delta.content for part in parts)
    assert "".join(filter(None, deltas)) == chat
    stop = chat[5:8]
    cut = client.chat.completions.create(messages=said, stop=stop, **asked).choices[0]
    assert (cut.message.content, cut.finish_reason) == (chat[: chat.index(stop)], "stop")
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.completions.create(prompt=PROMPT, **asked)
    assert last.usage == plain.usage


@pytest.mark.slow
def test_a_server_outlives_clients_that_disconnect_or_send_invalid_requests(served: str) -> None:
    client = openai.OpenAI(base_url=served, api_key="none", max_retries=0)
    asked = {"model": "mixtral", "prompt": PROMPT}
    parts = client.completions.create(max_tokens=CONTEXT, stream=True, **asked)
    next(iter(parts))
    parts.close()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(temperature=-1, **asked)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="the model's context has 4,096"):
        client.completions.create(model="mixtral", prompt="x " * CONTEXT)
    with pytest.raises(openai.BadRequestError, match="n: this server does not support the field"):
        client.completions.create(n=2, **asked)
    with pytest.raises(openai.BadRequestError, match="a part is not text"):
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        said = [{"role": "user", "content": [image]}]
        client.chat.completions.create(model="mixtral", messages=said)
    assert client.completions.create(max_tokens=4, **asked).usage.completion_tokens == 4


@pytest.mark.slow
def test_32_clients_at_once_get_their_own_texts(served: str) -> None:
    async def answers() -> list[str]:
        client = openai.AsyncOpenAI(base_url=served, api_key="none", max_retries=0)

        async def answer(prompt: str) -> str:
            parts = await client.completions.create(
                model="mixtral", prompt=prompt, max_tokens=16, temperature=0, stream=True
            )
            return "".join([part.choices[0].text async for part in parts])

        return await asyncio.gather(*[answer(PROMPTS[each % 3]) for each in range(32)])

    found = asyncio.run(answers())
    client = openai.OpenAI(base_url=served, api_key="none", max_retries=0)
    for each, prompt in enumerate(PROMPTS):
        alone = client.completions.create(
            model="mixtral", prompt=prompt, max_tokens=16, temperature=0
        )
        assert set(found[each::3]) == {alone.choices[0].text}


def test_a_port_in_use_is_refused_with_a_message(out: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", out, "--port", str(port))
    assert done.code == 2
    assert done.error == (
        f"--port {port}: cannot listen on 127.0.0.1:{port}: Address already in use"
    )
