"""A GPT-2 with a cache computes what it computes of the whole sequence."""

from __future__ import annotations

from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import FeedError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.families.mumoe_gpt2 import GPT2Spec
from moexport.plugins.demo.mumoe import save, trainable_gpt2
from moexport.tests.command import run
from torch import nn

POSITIONS, DEPTH, HEADS, DIM = 224, 2, 2, 16
PROMPT, NEW = 6, 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with random weights, its embeddings large enough to say different things."""
    path = tmp_path_factory.mktemp("gpt2") / "gpt2.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        spec = GPT2Spec(POSITIONS, 40, DEPTH, HEADS, DIM, bias=True)
        model = trainable_gpt2(spec, 8, hidden=32, rank=8)
        for name, weight in model.named_parameters():
            if name.endswith(("wte.weight", "wpe.weight")):
                nn.init.normal_(weight)
    save(model, path, n_layer=DEPTH, n_head=HEADS, n_embd=DIM)
    return path


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Bundle:
    folder = checkpoint.parent / "cached"
    outcome = run("export", checkpoint, "--set", "use_cache=true", "-o", folder)
    assert outcome.code == 0, outcome.err
    return Bundle.open(folder)


def fed_back(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The cache that a call returned, as inputs of the next one."""
    return {
        name.replace("present", "past_key_values"): array
        for name, array in outputs.items()
        if name.startswith("present")
    }


def test_the_cache_is_called_as_other_exporters_call_it(bundle: Bundle) -> None:
    names = [f"{block}.{part}" for block in range(DEPTH) for part in ("key", "value")]
    manifest = bundle.manifest
    assert [each.name for each in manifest.inputs] == [
        "input_ids",
        *(f"past_key_values.{name}" for name in names),
    ]
    assert [each.name for each in manifest.outputs] == [
        "logits",
        *(f"present.{name}" for name in names),
    ]
    assert manifest.inputs[1].shape == ("batch", HEADS, "past", DIM // HEADS)
    assert manifest.outputs[1].shape == ("batch", HEADS, "past + tokens", DIM // HEADS)
    assert manifest.parity is not None and manifest.parity["passed"]
    assert run("verify", bundle.path).code == 0


def test_the_greedy_text_is_pytorch_s_over_200_tokens(checkpoint: Path, bundle: Bundle) -> None:
    module = moexport.load(checkpoint).module
    prompt = np.random.default_rng(1).integers(0, 40, (2, PROMPT))
    wanted = torch.from_numpy(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits: torch.Tensor = module(wanted)
            wanted = torch.cat((wanted, logits[:, -1:].argmax(dim=-1)), dim=1)
    session, found = bundle.session(), prompt
    feed = {"input_ids": prompt}
    for _ in range(NEW):
        outputs = session.run(feed)
        new = outputs["logits"][:, -1:].argmax(axis=-1)
        found = np.concatenate((found, new), axis=1)
        feed = {"input_ids": new, **fed_back(outputs)}
    assert (found == wanted.numpy()).all()
    assert len(np.unique(found)) > 3


def test_a_prompt_may_come_in_parts(checkpoint: Path, bundle: Bundle) -> None:
    ids = np.random.default_rng(2).integers(0, 40, (3, 30))
    with torch.no_grad():
        logits: torch.Tensor = moexport.load(checkpoint).module(torch.from_numpy(ids))
    session = bundle.session()
    first = session.run({"input_ids": ids[:, :17]})
    second = session.run({"input_ids": ids[:, 17:], **fed_back(first)})
    both = np.concatenate((first["logits"], second["logits"]), axis=1)
    assert np.abs(both - logits.numpy()).max() < 1e-4 * np.abs(both).max()


def test_a_cache_longer_than_the_positions_is_refused(bundle: Bundle) -> None:
    session = bundle.session()
    full = np.zeros((1, HEADS, POSITIONS, DIM // HEADS), np.float32)
    names = [each.name for each in bundle.manifest.inputs[1:]]
    feed: dict[str, np.ndarray] = dict.fromkeys(names, full)
    feed["input_ids"] = np.zeros((1, 1), np.int64)
    with pytest.raises(FeedError, match="has 224 tokens and 1 more are given"):
        session.run(feed)
    shorter = {name: array[:, :, 1:] for name, array in feed.items() if array.ndim == 4}
    assert session.run(feed | shorter)["logits"].shape == (1, 1, 40)


def test_a_cache_is_asked_for_by_true_or_false(checkpoint: Path, tmp_path: Path) -> None:
    outcome = run("export", checkpoint, "--set", "use_cache=perhaps", "-o", tmp_path / "out")
    assert outcome.code == 1 and "neither true nor false" in outcome.error
