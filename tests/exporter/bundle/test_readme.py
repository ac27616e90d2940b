"""A bundle says what it is: on its own page, and in its graphs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.readme import README_FILE, readme, with_readme
from moexport.plugins.token_routed.tests.test_vmoe_vit import config_file, read_case
from moexport.tests.command import run
from moexport.tests.recorded import DATA, VIT_SETS

PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_says_what_the_bundle_is_and_where_no_file_lies(exported: Path) -> None:
    page = (exported / README_FILE).read_text(encoding="utf-8")
    manifest = Bundle.open(exported).manifest
    for text in ("weights.pt", "soft-moe-vit", manifest.source.sha256, "fp32", "num_heads = 4"):
        assert text in page
    for layer in manifest.layers:
        assert f"| {layer.name} | soft-moe | {layer.k} of 8 | {layer.lowering} | fp32 |" in page
    for name in manifest.files.keys() - {README_FILE}:
        assert f"| `{name}` | {manifest.files[name].bytes:,} |" in page
    assert all(f"- {note}" in page for note in manifest.notes)
    assert "Not checked" not in page
    assert manifest.source.path not in page  # the folders of whoever exported it


@pytest.mark.parametrize(
    ("case", "given"),
    [
        ("soft_moe_vit", (*VIT_SETS, "--k", "input")),
        ("soft_moe_mnist", ("--batch", "4", "--no-verify")),
        ("soft_moe_mnist", ("--target", "ort-web", "--k", "2")),
        ("mumoe_gpt2_cp", ("--set", "n_head=4")),
    ],
)
def test_the_page_s_program_runs(
    case: str, given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run("export", DATA / case / "weights.pt", "-o", tmp_path / "out", *given)
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "out" / README_FILE).read_text(encoding="utf-8")
    (program,) = PROGRAM.findall(page)
    assert "CUDA" not in program
    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, np.ndarray] = {}
    exec(program, names)
    assert np.isfinite(names["y"]).all()
    assert ("Not checked" in page) == ("--no-verify" in given)


@pytest.mark.parametrize(
    ("ks", "title"),
    [
        ((2, 2), "k = 2 of 8 experts per input"),
        ((2, 4), "k = 2 of 8 and 4 of 8 experts, by layer"),
        ((1, 2, 4), "k = 1 of 8 and 2 of 8 and 4 of 8 experts, by layer"),
        ((1, 2, 3, 4), "k = 1 of 8 to 4 of 8 experts, by layer"),
    ],
)
def test_the_title_has_the_k_of_every_layer(
    exported: Path, ks: tuple[int, ...], title: str
) -> None:
    manifest = Bundle.open(exported).manifest
    layers = [replace(manifest.layers[0], name=f"l{i}", k=k) for i, k in enumerate(ks)]
    page = readme(replace(manifest, layers=layers))
    assert page.splitlines()[0] == f"# weights.pt, {title}"


def test_the_title_of_a_graph_that_takes_k_says_any(exported: Path) -> None:
    manifest = Bundle.open(exported).manifest
    page = readme(replace(manifest, layers=[replace(each, k=None) for each in manifest.layers]))
    assert page.startswith("# weights.pt, any k of 8 experts per input\n")


def test_experts_that_were_dropped_count_as_those_that_were_trained(exported: Path) -> None:
    manifest = Bundle.open(exported).manifest
    small = replace(manifest.layers[0], experts=3, trained=8, k=3)
    assert "| 3 of 8 |" in readme(replace(manifest, layers=[small]))
    page = readme(replace(manifest, layers=[replace(small, k=2)]))
    assert "| 2 of 3 (of 8 trained) |" in page


@pytest.mark.parametrize("target", ["ort-cuda", "tensorrt", "tensorrt-rtx", "ort-cpu"])
def test_a_bundle_for_a_gpu_tells_that_it_was_never_run_on_one(target: str, tmp_path: Path) -> None:
    given = ("--target", target, *(("--no-engine",) if target.startswith("tensorrt") else ()))
    outcome = run(
        *("export", DATA / "soft_moe_mnist" / "weights.pt", "-o", tmp_path / "out", *given)
    )
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "out" / README_FILE).read_text(encoding="utf-8")
    assert ("**Never run on a GPU**" in page) == (target != "ort-cpu")


@pytest.mark.slow
def test_the_page_s_program_gives_a_whole_group_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = read_case("jax_vmoe_last2_k2")
    given = ("--config", config_file(case, tmp_path), "--no-verify")
    outcome = run("export", case.index, "-o", tmp_path / "out", *given)
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "out" / README_FILE).read_text(encoding="utf-8")
    assert "named axes may have any size, the batch any multiple of 4." in page
    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, np.ndarray] = {}
    exec(PROGRAM.findall(page)[0], names)
    assert names["y"].shape == (4, 10)


def test_a_bundle_without_the_page_is_whole(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    (bundle / README_FILE).unlink()
    del manifest.files[README_FILE]
    (bundle / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    assert run("verify", bundle).code == 0
    assert README_FILE in with_readme(bundle, manifest).files


def test_a_graph_says_what_it_is_to_whoever_looks_at_it(exported: Path) -> None:
    model = onnx.load(exported / "model.onnx", load_external_data=False)
    assert model.doc_string.startswith("soft-moe-vit for onnx in fp32, exported by moexport ")
    said = {entry.key: entry.value for entry in model.metadata_props}
    for layer in Bundle.open(exported).manifest.layers:
        what = f"k = {layer.k} of 8 experts"
        assert said[f"moexport.{layer.name}"] == what
        assert f"{layer.name}: {what}" in model.graph.doc_string
