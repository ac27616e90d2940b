"""ONNX Runtime GenAI generates text from the unchanged folder of a language model's bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.model import fingerprint
from moexport.plugins.demo.experts import trained_tokenizer
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save, transformers
from moexport.plugins.tune.recipe import LayerRecipe, Recipe

genai: Any = pytest.importorskip("onnxruntime_genai", reason="the extra generate is not installed")

PROMPTS = ("The graph", "moexport checks that it selects the same experts", "k of n experts is")
NEW = 24
END = 7
"""A token that random models generate now and then."""


def text_model(name: str, folder: Path, *, second: bool = False, **more: Any) -> Path:
    """Writes a model with random weights and a tokenizer of moexport's own README."""
    readme = Path(moexport.__file__).with_name("README.md").read_text(encoding="utf-8")
    sizes = {"vocab_size": 304, "max_position_embeddings": 96, "eos_token_id": END}
    save(ARCHITECTURES[name], folder, second=second, **{**sizes, **more})
    tokenizer = trained_tokenizer(readme, 300)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(str(folder))
    return folder


def greedy(name: str, folder: Path, ids: np.ndarray, **config: Any) -> list[int]:
    """Returns the tokens that transformers generates after others."""
    model = getattr(transformers, ARCHITECTURES[name].name).from_pretrained(
        folder, dtype=torch.float32, **config
    )
    given = torch.from_numpy(ids.astype(np.int64))[None]
    out = model.eval().generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False
    )
    return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def generated(model: Any, prompts: np.ndarray) -> list[list[int]]:
    """Returns the tokens that GenAI generates after prompts [b, m], padded on the right."""
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=prompts.shape[1] + NEW, batch_size=len(prompts))
    generator = genai.Generator(model, params)
    generator.append_tokens(prompts)
    while not generator.is_done():
        generator.generate_next_token()
    rows = [generator.get_sequence(row)[prompts.shape[1] :] for row in range(len(prompts))]
    return [row.tolist() for row in rows]


def before_the_end(tokens: list[int]) -> list[int]:
    """Returns tokens up to the end token, which GenAI omits in a single text."""
    return tokens[: tokens.index(END)] if END in tokens else tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "second", "layers"),
    [("olmoe", False, 6), ("mixtral", True, 2), ("gpt_oss", False, 2)],
    ids=["olmoe of six layers", "mixtral with a window", "gpt_oss"],
)
def test_genai_generates_what_transformers_does_one_by_one_and_in_a_batch(
    name: str, second: bool, layers: int, tmp_path: Path
) -> None:
    """Windows of gpt_oss and Mixtral count tokens, not the padding between them.

    From five layers on, PyTorch's exporter reads the batch's size from the cache of a layer.
    """
    folder = text_model(name, tmp_path / "model", second=second, num_hidden_layers=layers)
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", target="ort-cpu")
    search = json.loads((bundle.path / "genai_config.json").read_text())["search"]
    assert search["past_present_share_buffer"]
    model = genai.Model(str(bundle.path))
    tokenizer = genai.Tokenizer(model)
    known = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [each.tolist() for each in ids] == [known(each)["input_ids"] for each in PROMPTS]
    wanted = [before_the_end(greedy(name, folder, each)) for each in ids]
    assert [before_the_end(generated(model, each[None])[0]) for each in ids] == wanted
    together = generated(model, tokenizer.encode_batch(list(PROMPTS)).as_numpy())
    assert [before_the_end(each) for each in together] == wanted


@pytest.mark.slow
def test_four_bits_and_a_k_of_each_layer_generate_what_the_graph_computes(tmp_path: Path) -> None:
    """They can also come from a recipe, as `tune` writes it."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_experts_per_tok": 4}
    folder = text_model("mixtral", tmp_path / "model", eos_token_id=None, **sizes)
    model = moexport.load(folder)
    options: dict[str, Any] = {"target": "ort-cpu", "verify": False}
    bundles = [
        moexport.export(model, tmp_path / "k", k="1,3", precision="int4", quantize="all", **options)
    ]
    layers = {
        name: LayerRecipe(k=k, precision="int4", lowering="fused")
        for name, k in zip(model.layers, (1, 3), strict=True)
    }
    made = Recipe(
        model=fingerprint(model),
        data="",
        target="ort-cpu",
        precision="int4",
        quantize="all",
        batch="1:1:4",
        tokens="1:32:90",
        opset=20,
        layers=layers,
    )
    made.write(tmp_path / "recipe.yaml")
    recipe = tmp_path / "recipe.yaml"
    bundles.append(moexport.export(model, tmp_path / "recipe", recipe=recipe, verify=False))
    prompt = np.arange(5, 17)
    for bundle in bundles:
        assert [layer.k for layer in bundle.manifest.layers] == [1, 3]
        text = prompt
        for _ in range(NEW):
            scores = bundle.session().run({"input_ids": text[None]})["logits"][0, -1]
            text = np.append(text, scores.argmax())
        genai_model = genai.Model(str(bundle.path))
        assert generated(genai_model, prompt[None].astype(np.int32))[0] == text[12:].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = text_model("mixtral", tmp_path_factory.mktemp("generation") / "model")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "auto_map": {"AutoModel": "code.Own"}}))
    (folder / "code.py").write_text("raise SystemExit('was run')")
    settings = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "eos_token_id": [END, 9]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return moexport.export(moexport.load(folder), folder.parent / "out", k=1, verify=False)


def test_a_bundle_lists_every_file_of_its_text_and_names_no_code(bundle: Bundle) -> None:
    files = {*bundle.manifest.files}
    named = {"config.json", "generation_config.json", "genai_config.json", "chat_template.jinja"}
    assert files >= named | {"tokenizer.json", "tokenizer_config.json"}
    assert "code.py" not in files
    assert not any("auto_map" in each.read_text() for each in bundle.path.glob("*.json"))
    readme = (bundle.path / "README.md").read_text(encoding="utf-8")
    assert "`genai_config.json`" in readme
    (bundle.path / "tokenizer.json").write_text("{}")
    failed = [check.name for check in bundle.verify() if not check.passed]
    assert any("tokenizer.json" in name for name in failed), failed


def test_configurations_are_those_of_the_graph(bundle: Bundle, folder: Path) -> None:
    read = {each.stem: json.loads(each.read_text()) for each in bundle.path.glob("*config.json")}
    assert read["config"]["num_experts_per_tok"] == 1
    assert json.loads((folder / "config.json").read_text())["num_experts_per_tok"] == 2
    model, search = read["genai_config"]["model"], read["genai_config"]["search"]
    assert model["decoder"]["session_options"]["mlas.disable_kleidiai"] == "1"
    assert model["eos_token_id"] == [END, 9] == read["generation_config"]["eos_token_id"]
    assert model["vocab_size"] == 304 and model["context_length"] == search["max_length"] == 96
    assert (search["do_sample"], search["temperature"], search["top_p"]) == (True, 0.5, 0.9)
    config = transformers.AutoConfig.from_pretrained(bundle.path)
    assert type(config) is transformers.MixtralConfig


@pytest.mark.slow
def test_a_bundle_that_cannot_generate_has_a_note(tmp_path: Path) -> None:
    no_tokenizer = save(ARCHITECTURES["mixtral"], tmp_path / "model")
    bundle = moexport.export(moexport.load(no_tokenizer), tmp_path / "none", verify=False)
    assert bundle.manifest.notes[-1].endswith(f"{no_tokenizer} has no tokenizer.json")
    small = text_model("mixtral", tmp_path / "small", vocab_size=200)
    bundle = moexport.export(moexport.load(small), tmp_path / "small-out", verify=False)
    assert (
        "it has the token 299, but this model's vocabulary ends at 199"
        in (bundle.manifest.notes[-1])
    )
    fixed = moexport.export(moexport.load(small), tmp_path / "fixed", tokens=5, verify=False)
    assert "genai_config.json" not in fixed.manifest.files
