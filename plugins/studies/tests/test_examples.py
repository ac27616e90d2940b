"""`specialise --examples` shows the inputs and tokens with the largest weights of an expert."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.exporter.inputs import fitted_arrays
from moexport.graphs.layers.mumoe import MuMoE
from moexport.plugins.demo.digits import load_digits
from moexport.plugins.studies.examples.report import page as page_of
from moexport.plugins.studies.examples.search import Examples, examples_of
from moexport.plugins.studies.examples.shown import as_bytes
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save
from moexport.plugins.token_routed.tests.test_vmoe_vit import read_case as vmoe_case
from moexport.tests.bench.heads import trained_head
from moexport.tests.command import run
from moexport.tests.graphs.score_formulas import all_coefficients, soft_moe_scores, tokens_of
from moexport.tests.recorded import DATA, ENTMAX, VIT_SETS, read_case
from PIL import Image


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return trained_head(tmp_path_factory.mktemp("head"))


def largest(scores: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The rows of the largest scores [s] above 0."""
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:count]
    return [(row, float(scores[row])) for row in order if scores[row] > 0]


def assert_weights(found: Examples, level: int, expert: int, scores: np.ndarray) -> None:
    """The examples of an expert have the largest of some scores, as numbers and as weights."""
    (of_expert,) = (e for e in found.experts if (e.level, e.expert) == (level, expert))
    wanted = largest(scores, 9)
    # If float64 does not distinguish a weight from zero, or two weights, either is correct.
    weights = [example.weight for example in of_expert.examples]
    shown = [weight for weight in weights if weight > 1e-6]
    expected = [weight for _, weight in wanted if weight > 1e-6]
    np.testing.assert_allclose(shown, expected[: len(shown)], atol=2e-5)
    assert abs(len(shown) - len(expected)) <= 1
    for example in of_expert.examples:
        assert scores[example.input] == pytest.approx(example.weight, abs=2e-5)


@pytest.mark.parametrize("levels", [(12,), (4, 3)])
def test_an_expert_s_examples_are_its_nine_inputs_of_the_largest_coefficients(
    levels: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoint, data = trained_head(tmp_path, levels)
    model = moexport.load(checkpoint, config={"act": "entmax15"})
    found = examples_of(model, data, count=9)
    with np.load(data) as arrays:
        x, labels = arrays["input"], arrays["label"]
    layer = model.layers["layer"]
    assert isinstance(layer, MuMoE)
    assert found.inputs == len(x) and found.weight == "coefficient"
    for level, scores in enumerate(all_coefficients(layer, x), start=1):
        for expert in range(scores.shape[1]):
            assert_weights(found, level, expert, scores[:, expert])
    shown = [example for expert in found.experts for example in expert.examples]
    assert all(example.label == labels[example.input] for example in shown)
    assert any(not expert.examples for expert in found.experts) or len(levels) > 1


def test_an_expert_of_a_soft_moe_layer_has_inputs_by_column_sum_and_tokens_by_dispatch() -> None:
    of_network = moexport.load("examples.own_layers:build", config={"layer": "masked"})
    inputs = LabelledData(np.zeros((2, 12, 6), np.float32), None)
    assert examples_of(of_network, inputs).share == "mean weight of the expert's slots (C)"
    case = read_case("soft_moe_vit_slots")
    model = moexport.load(case.weights, config=case.config)
    x = np.random.default_rng(0).standard_normal((70, *case.x.shape[1:])).astype(np.float32)
    name = next(iter(model.layers))
    found = examples_of(model, LabelledData(x, None), layer=name, count=9)
    with tokens_of(model) as seen, torch.no_grad():
        model.module(torch.from_numpy(x).double())
        _, dispatch, sums = soft_moe_scores(model.layers[name], seen[name][0].numpy())
    share = dispatch.mean(axis=3)
    for expert in range(sums.shape[1]):
        assert_weights(found, 1, expert, sums[:, expert])
        for row, example in enumerate(found.experts[expert].examples):
            own = share[example.input, :, expert]
            np.testing.assert_allclose(found.shares[0][row, expert], own, atol=2e-5)
            assert [at for at, _ in example.tokens] == [at for at, _ in largest(own, 3)]
    assert found.shares[0].sum(axis=2) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_tokens_of_a_language_model_are_examples_by_their_gates(tmp_path: Path) -> None:
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    model = moexport.load(folder)
    ids = np.random.default_rng(0).integers(0, 60, (5, 11))
    mask = np.tile(np.arange(11) < 7, (5, 1)).astype(np.int64)
    np.savez(tmp_path / "x.npz", input_ids=ids, attention_mask=mask)
    name = list(model.layers)[-1]
    found = examples_of(model, tmp_path / "x.npz", count=4)
    with tokens_of(model) as seen, torch.no_grad():
        whole = fitted_arrays({"input_ids": ids, "attention_mask": mask}, model)
        model.module(*map(torch.from_numpy, whole.values()))
    _, index, weights = seen[name]
    gates = np.zeros((55, model.layers[name].spec.experts))
    np.put_along_axis(gates, index.numpy(), weights.double().numpy(), axis=1)
    gates[mask.reshape(-1) == 0] = 0
    for expert in found.experts:
        wanted = largest(gates[:, expert.expert], 4)
        places = [11 * example.input + example.tokens[0][0] for example in expert.examples]
        assert places == [place for place, _ in wanted]
        weights_of = [example.weight for example in expert.examples]
        assert weights_of == pytest.approx([weight for _, weight in wanted], abs=1e-5)
        assert [e.token for e in expert.examples] == [ids.reshape(-1)[at] for at in places]


def test_gates_of_dropped_tokens_do_not_count_and_groups_stay_whole() -> None:
    """V-MoE's experts have a capacity, and four images are routed together."""
    case = vmoe_case("jax_vmoe_last2_k2")
    model = moexport.load(case.index, config=case.config)
    x = case.x(16)
    found = examples_of(model, LabelledData(x, None))
    with tokens_of(model) as seen, torch.no_grad():
        model.module(torch.from_numpy(x).double())
    _, index, weights = seen[found.layer]
    experts = model.layers[found.layer].spec.experts
    assert (index >= experts).any()  # such a choice was dropped
    for expert in range(experts):
        gates = np.where(index.numpy() == expert, weights.double().numpy(), 0).max(axis=1)
        assert_weights(found, 1, expert, gates.reshape(16, -1).max(axis=1))
    with pytest.raises(moexport.errors.FeedError, match="6 inputs, but the model computes 4"):
        examples_of(model, LabelledData(x[:6], None))


@pytest.mark.slow
def test_a_tokenizer_beside_the_model_gives_the_text_around_a_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    words = tokenizers.models.WordLevel({f"<w{i}>": i for i in range(60)}, unk_token="<w0>")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    ids = np.random.default_rng(0).integers(0, 60, (3, 8))
    np.savez(tmp_path / "x.npz", input_ids=ids)
    out = tmp_path / "out"
    place = ("--data", tmp_path / "x.npz", "-o", out, "--examples", "2")
    assert run("specialise", folder, *place).code == 0
    found = json.loads((out / "examples.json").read_text())
    example = found["experts"][0]["examples"][0]
    assert example["text"] == " ".join(f"<w{i}>" for i in ids[example["input"]])
    page = (out / "examples.html").read_text()
    assert f"<mark> &lt;w{example['token']}&gt;</mark>" in page or "<mark>&lt;w" in page
    assert "<w1>" not in page  # the text is escaped


def pictures(page: str) -> dict[int, np.ndarray]:
    """The images of a page by the numbers of their inputs."""
    found = re.findall(r"\.i(\d+)\{[^}]*base64,([^)]*)\)", page)
    return {
        int(number): np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
        for number, text in found
    }


def test_the_page_shows_images_that_lie_beside_features_each_once(
    head: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, data = head
    images = load_digits().test.inputs[:, 0]
    with np.load(data) as arrays:
        np.savez(tmp_path / "x.npz", image=images, **dict(arrays))
    place = ("--data", tmp_path / "x.npz", "-o", tmp_path / "out", "--examples", "9")
    done = run("specialise", checkpoint, *ENTMAX, *place)
    assert done.code == 0 and "experts of layer, from 360 inputs, by coefficient" in done.out
    assert done.out.rstrip().endswith("examples.html")
    page = (tmp_path / "out" / "examples.html").read_text()
    found = json.loads((tmp_path / "out" / "examples.json").read_text())
    used = {example["input"] for expert in found["experts"] for example in expert["examples"]}
    shown = pictures(page)
    assert shown.keys() == used and page.count("base64,") == len(used)
    for number, image in shown.items():
        expected = (images[number] * 255).round()
        assert image.shape == (28, 28, 3)
        assert np.abs(image - expected[..., None]).max() <= 1
    assert "http" not in page and "6 experts have no examples" in page
    # The output without the option stays the same.
    assert (tmp_path / "out" / "specialise.json").exists()


def test_patches_of_an_image_are_marked_by_their_share_of_the_slots(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    np.savez(tmp_path / "x.npz", input=case.x)
    place = ("--data", tmp_path / "x.npz", "-o", tmp_path / "out", "--examples", "2")
    done = run("specialise", case.weights, *VIT_SETS, *place)
    assert done.code == 0 and not (tmp_path / "out" / "specialise.json").exists()
    page = (tmp_path / "out" / "examples.html").read_text()
    found = json.loads((tmp_path / "out" / "examples.json").read_text())
    example = found["experts"][0]["examples"][0]
    text = page.split("<h2>Expert 0</h2>")[1].split("base64,")[1].split(")")[0]
    veil = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
    assert veil.shape == (4, 4, 4)  # 16 patches; the 17th token, the first, is the class token
    largest_patch = next(at for at, _ in example["tokens"] if at > 0)
    assert int(veil[..., 3].argmax()) == largest_patch - 1 and veil[..., 3].max() == 160


def test_a_layer_that_mixes_patches_has_no_map_of_them(tmp_path: Path) -> None:
    """Its tokens are channels, here 32, and its width is the number of patches."""
    case = read_case("mumoe_mixer_cp")
    model = moexport.load(case.weights, config=case.config)
    np.savez(tmp_path / "x.npz", input=case.x)
    for name, layer in model.layers.items():
        found = moexport.specialise(model, tmp_path / "x.npz", layer=name, examples=1).examples
        assert found is not None
        assert ("by patch" in page_of(found)) == (layer.spec.dim != 16)


def test_texts_beside_features_are_shown_without_labels(
    head: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, data = head
    with np.load(data) as arrays:
        x, labels = arrays["input"], arrays["label"]
    texts = np.array([f"digit <{label}> & no. {i}" for i, label in enumerate(labels)])
    np.savez(tmp_path / "x.npz", input=x, text=texts)
    place = ("--data", tmp_path / "x.npz", "-o", tmp_path / "out", "--examples", "3")
    assert run("specialise", checkpoint, *ENTMAX, *place).code == 0
    page = (tmp_path / "out" / "examples.html").read_text()
    assert "digit &lt;7&gt; &amp; no. " in page and "<7>" not in page
    found = json.loads((tmp_path / "out" / "examples.json").read_text())
    for expert in found["experts"]:
        assert all(e["text"] == texts[e["input"]] for e in expert["examples"])
    assert not (tmp_path / "out" / "specialise.json").exists()
    said = run("specialise", checkpoint, *ENTMAX, *place[:2], "--examples", "3", "--json")
    assert json.loads(said.out)["examples"]["experts"] == found["experts"]


@pytest.mark.parametrize(
    ("arrays", "options", "error", "hint"),
    [
        ({}, ["--examples", "0"], "--examples 0: must be at least 1", "leave --examples out"),
        ({}, [], "accuracy by class needs labels", "--examples 9"),
        (
            {"image": np.zeros((3, 28, 28))},
            ["--examples", "9"],
            "array 'image' is float64 of shape (3, 28, 28), for 360 inputs",
            "(samples, height, width)",
        ),
        ({"text": np.zeros(360)}, ["--examples", "9"], "array 'text' is float64", "texts"),
        (
            {},
            ["--examples", "9", "--layer", "head"],
            "--layer head: the model has no such MoE layer",
            "layer",
        ),
    ],
    ids=["none", "no labels", "images", "texts", "layer"],
)
def test_what_cannot_be_shown_is_refused(
    arrays: dict[str, Any],
    options: list[str],
    error: str,
    hint: str,
    head: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    checkpoint, data = head
    with np.load(data) as held:
        np.savez(tmp_path / "x.npz", input=held["input"], **arrays)
    place = ("--data", tmp_path / "x.npz", "-o", tmp_path / "out")
    refused = run("specialise", checkpoint, *ENTMAX, *place, *options)
    assert refused.code != 0 and error in refused.error and hint in refused.hint
    assert not (tmp_path / "out").exists()


def test_images_are_bytes_whatever_their_layout_and_scale() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (5, 6, 7)).astype(np.uint8)
    grey[0, 0, :2] = 0, 255
    wanted = np.repeat(grey[..., None], 3, axis=3)
    unit = grey / 255
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    standardised = ((unit[..., None] - mean) / deviation).astype(np.float32)
    for images in (
        *(grey, grey[..., None], wanted, wanted.transpose(0, 3, 1, 2)),
        *(grey.astype(np.float32), unit, unit * 2 - 1, standardised),
        standardised.transpose(0, 3, 1, 2),
    ):
        found = as_bytes(np.asarray(images))
        assert found.shape == wanted.shape and found.dtype == np.uint8
        assert np.abs(found.astype(int) - wanted).max() <= 1
    assert as_bytes(np.zeros((2, 4, 4), np.float32)).max() == 0


def test_several_models_without_labels_have_a_folder_each(
    head: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, data = head
    other = tmp_path / "other.pt"
    other.write_bytes(checkpoint.read_bytes())
    with np.load(data) as held:
        np.savez(tmp_path / "x.npz", input=held["input"])
    place = ("--data", tmp_path / "x.npz", "-o", tmp_path / "out", "--examples", "2")
    done = run("specialise", checkpoint, other, *ENTMAX, *place)
    assert done.code == 0 and done.out.count("by coefficient") == 2
    assert (tmp_path / "out" / "other" / "examples.html").exists()


def test_a_layer_alone_shows_its_tokens(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float32)
    np.savez(tmp_path / "x.npz", input=x)
    weights = DATA / "soft_moe_lucidrains" / "weights.pt"
    done = run("specialise", weights, "--data", tmp_path / "x.npz", "--examples", "2", "--json")
    found = json.loads(done.out)["examples"]
    assert done.code == 0 and found["share"] == "share of the expert's slots (D)"
    assert all(len(e["tokens"]) == 3 for expert in found["experts"] for e in expert["examples"])
