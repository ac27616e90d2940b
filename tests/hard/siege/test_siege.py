"""The real server under hostile clients for two minutes, all on this machine's own address."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import moexport
import pytest
from moexport.plugins.text.tests.serving import CONTEXT, PROMPT, Server, get, post, with_tokenizer
from moexport.tests.hard.siege.hostile import KINDS, TEXTS

pytest.importorskip("uvicorn", reason="the extra generate is not installed")

WAVES, QUIET_S = 8, 4.0
WAVE_S = float(os.environ.get("MOEXPORT_WAVE_S", "15"))
"""Attacks alternate with quiet, so that both are of the same machine, whatever else it does."""

ALONE = bool(os.environ.get("MOEXPORT_ALONE"))
"""Whether no other test runs meanwhile, as `make siege` promises: times can be compared."""

ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 500, "temperature": 0}


def honest(server: Server, seconds: float, texts: set[str]) -> list[float]:
    """Asks for one text after another, adds them to `texts`, and returns how long each took.

    As clients do, it asks again where the server is busy, which is part of the time.
    """
    took, end = list[float](), time.monotonic() + seconds
    while time.monotonic() < end or not took:
        begun = time.monotonic()
        while (answer := post(server.port, ASKED)).status == 503:
            time.sleep(float(answer.headers["retry-after"]))
        assert answer.status == 200, answer.text
        took.append(time.monotonic() - begun)
        texts.add(answer.said)
        time.sleep(0.1)
    return took


@pytest.mark.slow
def test_honest_clients_are_served_beside_hostile_ones(out: Path, tmp_path: Path) -> None:
    program = (sys.executable, "-m", "moexport.tests.hard.siege.hostile")
    alone, beside = list[float](), list[float]()
    texts, hostile = set[str](), Counter[str]()
    with Server(out, tmp_path) as server:
        worked_in(server)
        before = server.memory()
        for _ in range(WAVES):
            alone += honest(server, QUIET_S, texts)
            attack = subprocess.Popen(
                [*program, str(server.port), str(WAVE_S)], stdout=subprocess.PIPE, text=True
            )
            beside += honest(server, WAVE_S, texts)
            counted, _ = attack.communicate(timeout=120)
            hostile += Counter(json.loads(counted))
        time.sleep(2)
        after = server.memory()
        log = server.log.read_text()
        figures = {
            "alone": summary(alone),
            "beside": summary(beside),
            "hostile": hostile,
            "MiB": [round(before, 1), round(after, 1)],
            "log": [log.count("\n"), len(log)],
            "answers": re.findall(r'status="(\d+)"} (\d+)', get(server.port, "/metrics").text),
        }
        print(json.dumps(figures))
    assert len(texts) == 1 and texts == {
        "".join(moexport.generate(out, PROMPT, max_tokens=500, temperature=0.0))
    }
    assert set(hostile) == {kind.__name__ for kind in KINDS}
    if ALONE:
        assert statistics.median(beside) < 3 * statistics.median(alone), figures
    assert after < 1.1 * before, figures
    assert "Traceback" not in log
    assert len(log) < 150 * log.count("\n")
    assert log.count("\n") < 700 * sum(hostile.values())


def worked_in(server: Server) -> None:
    """Gives a server the work of a day: short and long prompts, several texts at once."""
    with ThreadPoolExecutor(16) as clients:
        full = {"prompt": "0" * (CONTEXT - 200), "max_tokens": 100}
        for asked in (ASKED, full, {**ASKED, "stream": True}):
            list(clients.map(lambda asked: post(server.port, asked), [asked] * 32))


def summary(seconds: list[float]) -> dict[str, float]:
    """How long texts took."""
    most = statistics.quantiles(seconds, n=10)[-1]
    times = {"median_s": statistics.median(seconds), "p90_s": most, "texts": len(seconds)}
    return {name: round(value, 3) for name, value in times.items()}


def split(pattern: str) -> dict[str, Any]:
    """A step of a pretokenizer that cuts a text where a pattern matches."""
    parts = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Split", **parts}


LETTERS, CONTRACTION = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?\p{Lu}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

PATTERNS = {
    "GPT-2": [split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")],
    "Llama 3": [split(rf"{CONTRACTION}|{LETTERS}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}")],
    "Qwen 2": [split(rf"{CONTRACTION}|{LETTERS}|\p{{N}}|{SIGNS}|{SPACES}")],
    "Qwen 3.5": [
        split(rf"{CONTRACTION}|[^\r\n\p{{L}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{SIGNS}|{SPACES}")
    ],
    "GPT-4o": [split(rf"{CASED}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}")],
    "Kimi": [split(rf"[\p{{Han}}]+|{CASED}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}")],
    "DeepSeek": [
        split(r"\p{N}{1,3}"),
        split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        split(rf"[!-/:-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|{SPACES}"),
    ],
    "StarCoder": [{"type": "Digits", "individual_digits": True}, split(r" ?\p{L}+|\s+(?!\S)|\s+")],
    "BLOOM": [split(r" ?[^(\s|[.,!?…。，、।۔،])]+")],
    "Falcon": [{"type": "Punctuation", "behavior": "Contiguous"}, split("[0-9][0-9][0-9]")],
    "BERT": [{"type": "BertPreTokenizer"}],
    "Metaspace": [{"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}],
    "whitespace": [{"type": "Whitespace"}],
}
"""The kinds of patterns that published tokenizers cut a text with."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_takes_every_text(name: str, out: Path, tmp_path: Path) -> None:
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [*PATTERNS[name], {**last, "use_regex": False}]
    cut = {"type": "Sequence", "pretokenizers": steps}
    bundle = with_tokenizer(out, tmp_path / "bundle", pre_tokenizer=cut)
    with Server(bundle, tmp_path) as server:
        post(server.port, {"prompt": PROMPT, "max_tokens": 1})
        for kind, text in TEXTS.items():
            for prompt in (text, text[: CONTEXT // 8]):
                answer = post(server.port, {"prompt": prompt, "max_tokens": 1})
                assert answer.status in (200, 400), (kind, answer.text)
                assert answer.seconds < 5, kind
            empty = prompt.isspace() and "the prompt is empty" in answer.text
            assert answer.status == 200 or empty, (kind, answer.text)


@pytest.mark.slow
def test_a_pattern_that_explodes_ends_a_request_and_not_the_server(
    out: Path, tmp_path: Path
) -> None:
    bundle = with_tokenizer(out, tmp_path / "bundle", pre_tokenizer=split("(a+)+$"))
    with Server(bundle, tmp_path) as server:
        answer = post(server.port, {"prompt": "a" * 3000 + "b", "max_tokens": 1})
        assert answer.status in (200, 400, 500)
        assert answer.seconds < 30
        assert post(server.port, {"prompt": PROMPT, "max_tokens": 1}).status == 200
