"""`export --layout`: other programs find a language model's files, and generate the same tokens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import moexport
import numpy as np
import onnx
import pytest
from moexport.errors import BundleError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.destination import others_in
from moexport.plugins.text.tests.test_generation import (
    NEW,
    PROMPTS,
    before_the_end,
    genai,
    generated,
    greedy,
    text_model,
)
from moexport.plugins.token_routed.tests.architectures import transformers
from moexport.tests.bench.report import browser
from moexport.tests.command import run
from moexport.tests.examples.test_web import WEB, served

has_library = pytest.mark.skipif(
    not (WEB / "node_modules" / "@huggingface").is_dir(),
    reason="transformers.js is not installed: make web",
)

GENERATE = """
import { AutoModelForCausalLM, AutoTokenizer } from "@huggingface/transformers";
export async function generate(folder, most, prompts, options = {}) {
  const tokenizer = await AutoTokenizer.from_pretrained(folder);
  const model = await AutoModelForCausalLM.from_pretrained(folder, options);
  const tokens = async (inputs) => {
    const out = await model.generate({ ...inputs, max_new_tokens: most });
    return out.tolist().map((row) => row.slice(inputs.input_ids.dims[1]).map(Number));
  };
  const alone = [];
  for (const prompt of prompts) alone.push(...(await tokens(await tokenizer(prompt))));
  Object.assign(tokenizer, { pad_token: "!", pad_token_id: 0, padding_side: "left" });
  const together = await tokens(await tokenizer(prompts, { padding: true }));
  const said = [{ role: "user", content: "hi" }];
  return [alone, together, tokenizer.apply_chat_template(said, { tokenize: false })];
}
"""

IN_NODE = """
import { env } from "@huggingface/transformers";
import { generate } from "./generate.mjs";
env.allowRemoteModels = false;
const [folder, most, ...prompts] = process.argv.slice(2);
console.log(JSON.stringify(await generate(folder, Number(most), prompts)));
"""

IN_PAGE = """<!doctype html>
<link rel="icon" href="data:,">
<script type="importmap">{"imports": {
  "@huggingface/transformers": "/LIBRARY/dist/transformers.web.js",
  "onnxruntime-common": "/LIBRARY/node_modules/onnxruntime-common/dist/esm/index.js",
  "onnxruntime-web/webgpu": "/LIBRARY/node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs"
}}</script>
<script type="module">
import { env } from "@huggingface/transformers";
import { generate } from "./generate.mjs";
Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/" });
env.backends.onnx.wasm.wasmPaths = "/LIBRARY/node_modules/onnxruntime-web/dist/";
const [most, prompts] = JSON.parse(decodeURIComponent(location.hash.slice(1)));
generate("transformers-js", most, prompts, { device: "wasm" }).then(
  (found) => { window.found = found; },
  (error) => { window.found = String(error.stack ?? error); },
);
</script>
""".replace("LIBRARY", "node_modules/@huggingface/transformers")


@pytest.fixture(
    scope="module",
    params=[
        ("olmoe", {"target": "ort-cpu"}, "model.onnx"),
        ("gpt_oss", {"target": "ort-web", "precision": "int8"}, "model_quantized.onnx"),
    ],
    ids=["an alias of olmoe", "gpt_oss in INT8"],
)
def for_the_web(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """Returns a folder with a layout and the programs, and the expected text."""
    name, options, file = request.param
    place = tmp_path_factory.mktemp("web")
    folder = text_model(name, place / "model")
    bundle = moexport.export(
        *(moexport.load(folder), place / "out"), layout="transformers-js", verify=False, **options
    )
    assert f"transformers-js/onnx/{file}" in bundle.manifest.files
    (bundle.path / "transformers-js").rename(place / "transformers-js")
    (place / "node_modules").symlink_to(WEB / "node_modules")
    for program, text in (
        *(("generate.mjs", GENERATE), ("node.mjs", IN_NODE)),
        ("index.html", IN_PAGE),
    ):
        (place / program).write_text(text, "utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [np.array(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    if "precision" in options:  # rounded weights may have other tokens than PyTorch's
        model = genai.Model(str(bundle.path))
        wanted = [generated(model, each[None].astype(np.int32))[0] for each in ids]
    else:
        wanted = [greedy(name, folder, each) for each in ids]
    return place, [before_the_end(each) for each in wanted]


def assert_generated(found: Any, wanted: list[list[int]]) -> None:
    assert isinstance(found, list), found
    alone, together, chat = found
    for tokens in (alone, together):
        assert [before_the_end(each) for each in tokens] == wanted
    assert chat == "<user> hi\n"


@pytest.mark.slow
@has_library
@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_transformers_js_generates_the_same_tokens_alone_and_in_a_batch(
    for_the_web: tuple[Path, list[list[int]]],
) -> None:
    place, wanted = for_the_web
    done = subprocess.run(
        ["node", place / "node.mjs", place / "transformers-js", str(NEW), *PROMPTS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_generated(json.loads(done.stdout), wanted)


@pytest.mark.slow
@has_library
@pytest.mark.skipif(browser.missing() is not None, reason=f"Chromium: {browser.missing()}")
def test_transformers_js_generates_the_same_tokens_in_a_browser(
    for_the_web: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    place, wanted = for_the_web
    asked = quote(json.dumps([NEW, PROMPTS]))
    with served(place) as address, browser.browser(tmp_path) as window:
        window.visit(f"{address}#{asked}")
        found = window.wait("return window.found", 120.0)
        assert_generated(found or window.console(), wanted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(
        *("mixtral", tmp_path_factory.mktemp("layouts") / "model"),
        hidden_size=32,
        intermediate_size=32,
    )


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    """A bundle with INT4 weights in the layout of optimum."""
    done = run(
        *("export", folder, "-o", folder.parent / "out", "--layout", "optimum", "--no-verify"),
        *("--target", "ort-cpu", "--precision", "int4"),
    )
    assert done.code == 0, done.err
    return Bundle.open(folder.parent / "out")


def test_a_layout_is_whole_and_every_file_of_it_is_in_the_manifest(bundle: Bundle) -> None:
    """optimum-onnx does not support transformers 5, so ONNX Runtime checks its names and shapes."""
    place = bundle.path / "optimum"
    files = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert files >= {"config.json", "generation_config.json", "tokenizer.json"}
    assert files >= {"onnx/model_q4.onnx", "onnx/model_q4.onnx_data"}
    assert {f"optimum/{file}" for file in files} <= bundle.manifest.files.keys()
    readme = (bundle.path / "README.md").read_text(encoding="utf-8")
    assert "for optimum, with the file name that it expects" in readme
    config = transformers.AutoConfig.from_pretrained(place)
    cache = [port for port in bundle.manifest.inputs if port.name.startswith("past")]
    sizes = (config.num_hidden_layers * 2, config.num_key_value_heads, config.head_dim)
    assert sizes == (len(cache), cache[0].shape[1], cache[0].shape[3])
    tokenizer = json.loads((place / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "{{ m.role }}" in tokenizer["chat_template"]


def test_its_graph_computes_what_the_bundles_own_does(bundle: Bundle, tmp_path: Path) -> None:
    import onnxruntime

    alone = tmp_path / "alone"
    shutil.copytree(bundle.path / "optimum", alone)
    file = alone / "onnx" / "model_q4.onnx"
    onnx.checker.check_model(file)
    session = onnxruntime.InferenceSession(file)
    ids = np.arange(6)[None]
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": ids}
    for port in session.get_inputs()[3:]:
        assert port.shape[0] == "batch_size"
        given[port.name] = np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32)
    found = session.run(["logits"], given)[0]
    np.testing.assert_allclose(found, bundle.session().run({"input_ids": ids})["logits"], atol=1e-6)


def test_what_does_not_belong_to_a_layout_is_found_and_kept(bundle: Bundle, tmp_path: Path) -> None:
    copy = tmp_path / "out"
    shutil.copytree(bundle.path, copy)
    (copy / "optimum" / "config.json").write_text("{}")
    failed = [check.name for check in Bundle.open(copy).verify() if not check.passed]
    assert failed == ["hash of optimum/config.json"]
    (copy / "optimum" / "onnx" / "own.txt").write_text("")
    assert others_in(copy, bundle.manifest.files) == ["optimum/onnx/own.txt"]
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace("optimum/config", "../config"))
    with pytest.raises(BundleError, match=re.escape("'../config.json' is not the name of a file")):
        Bundle.open(copy)


@pytest.mark.slow
def test_a_text_bundle_is_verified_and_run_without_plugins(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layout": "optimum", "tokens": "1:4:8", "threads": 1}
    bundle = moexport.export(moexport.load(folder), tmp_path / "out", **options)
    assert "genai_config.json" in bundle.manifest.files
    np.savez(tmp_path / "ids.npz", input_ids=np.arange(6)[None])
    for words in (
        ("verify", bundle.path),
        ("run", bundle.path, "-i", tmp_path / "ids.npz", "-o", tmp_path / "y.npz"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "moexport", *words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "MOEXPORT_PLUGINS": "off"},
        )
        assert done.returncode == 0, done.stderr


def test_a_layout_for_a_model_without_text_is_refused(folder: Path, tmp_path: Path) -> None:
    model = moexport.load(folder)
    with pytest.raises(UsageError, match="a causal language model with a cache"):
        moexport.export(model, tmp_path / "out", tokens=5, layout="optimum")
    with pytest.raises(UsageError, match='does not support precision="bf16"'):
        moexport.export(model, tmp_path / "out", precision="bf16", layout="transformers-js")
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "tokenizer.json").unlink()
    done = run("export", bare, "-o", tmp_path / "out", "--layout", "transformers-js")
    assert (done.code, done.error) == (2, f"--layout transformers-js: {bare} has no tokenizer.json")
    assert not (tmp_path / "out").exists()
