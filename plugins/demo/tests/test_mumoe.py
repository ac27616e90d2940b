"""The muMoE demo's networks are saved as in the released code, and compute the same there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.bench.metrics import TopKCounts
from moexport.bench.report.text import rows_table
from moexport.bench.results import Perplexity, Results, Row
from moexport.common.console import Silent
from moexport.errors import BundleError
from moexport.exporter.checkpoints.load import load
from moexport.exporter.families.mumoe_gpt2 import GPT2Spec
from moexport.exporter.families.mumoe_mixer import MixerSpec
from moexport.plugins.demo import mumoe as mumoe_demo
from moexport.plugins.demo import mumoe as topics
from moexport.plugins.demo.demo import run_demo
from moexport.tests.command import run
from torch import Tensor, nn


def networks() -> dict[str, tuple[nn.Module, Tensor, Tensor, dict[str, Any], str]]:
    """Each network with inputs, classes, required settings, and its family."""
    torch.manual_seed(0)
    images, ids = torch.rand(6, 1, 8, 8), torch.randint(20, (6, 9))
    labels = torch.randint(5, (6,))
    mixer = MixerSpec(grid=(2, 2), patch=4, channels=1, dim=8, depth=1, classes=5)
    gpt2 = GPT2Spec(16, 20, depth=2, heads=2, dim=8, bias=True)
    heads = {form: mumoe_demo.trainable_head(form, 8, 64, 5, 6) for form in ("cp", "tr")}
    vectors = images.flatten(1)
    return {
        "cp": (heads["cp"], vectors, labels, {"input_rank": 2, "act": "entmax15"}, "mumoe"),
        "tr": (heads["tr"], vectors, labels, {"input_rank": 2, "act": "entmax15"}, "mumoe"),
        "mixer": (
            mumoe_demo.trainable_mixer(mixer, 8, (6, 12), 5),
            images,
            labels,
            {"patch_size": 4, "act": "entmax15"},
            "mumoe-mixer",
        ),
        "gpt2": (mumoe_demo.trainable_gpt2(gpt2, 8, 12, 5), ids, ids, {}, "mumoe-gpt2"),
    }


@pytest.mark.parametrize("name", ["cp", "tr", "mixer", "gpt2"])
def test_a_trained_network_loads_as_its_family_and_computes_the_same(
    name: str, tmp_path: Path
) -> None:
    model, inputs, labels, config, family = networks()[name]
    model.train()
    before = torch.nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    mumoe_demo.fit(model, iter([(inputs, labels)] * 30), 30, 1e-2)
    arguments = {"n_head": 2} if name == "gpt2" else {}
    mumoe_demo.save(model, tmp_path / "model.pt", **arguments)
    loaded = load(tmp_path / "model.pt", config=config)
    assert loaded.family == family
    with torch.no_grad():
        expected = model(inputs)
        found = loaded.module(inputs)
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()))
    after = torch.nn.functional.cross_entropy(expected.flatten(0, -2), labels.flatten())
    assert after < before
    variances = [t for key, t in model.state_dict().items() if key.endswith("running_var")]
    assert variances
    assert all(not torch.allclose(t, torch.ones_like(t)) for t in variances)


def test_the_gates_gradient_is_that_of_its_values() -> None:
    logits = 2 * torch.randn(5, 7, dtype=torch.float64, generator=torch.manual_seed(1))
    assert torch.autograd.gradcheck(mumoe_demo.entmax15, (logits.requires_grad_(),))
    assert torch.allclose(mumoe_demo.entmax15(logits).sum(-1), torch.ones(5, dtype=torch.float64))


def test_the_text_is_split_by_topic_and_covers_its_characters() -> None:
    text = topics.load_topics()
    vocabulary = len(text.characters)
    assert 0 <= text.train.min() <= text.train.max() < vocabulary
    assert 0.03 < len(text.test) / len(text.train) < 0.4
    assert text.sequences(64, 8).shape == (8, 64)
    assert text.sequences(64, 8).dtype == np.int64
    assert "print" in "".join(text.characters[i] for i in text.train)
    again = topics.load_topics()
    assert np.array_equal(again.train, text.train)


def test_a_heads_scores_are_judged_without_their_axis_of_one_token() -> None:
    scores = np.eye(7, dtype=np.float32)[:, None]
    labels = np.array([0, 1, 2, 3, 4, 0, 0])
    assert TopKCounts.of(scores, labels, scores) == TopKCounts.of(
        scores[:, 0], labels, scores[:, 0]
    )
    assert TopKCounts.of(scores, labels).right == 5


def test_the_summary_shows_a_token_models_perplexity() -> None:
    row = Row("pytorch-eager", 8, 8, 1, "gpt2", perplexity=Perplexity(6.329, 1.0, 100))
    text = rows_table(Results((), (row,)))
    assert "perplexity" in text
    assert "6.329" in text


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    outcome = run("demo", "--family", "mumoe", "-o", tmp_path, "--force")
    assert outcome.code == 1
    assert "but is not a demo" in outcome.error
    with pytest.raises(BundleError):
        run_demo(mumoe_demo.DEMO, tmp_path, Silent(), force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
