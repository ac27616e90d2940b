"""Whatever a file holds, what reads it takes it or says what is wrong: no traceback, no end.

The files are those that a user hands over or gets from others, but for checkpoints
(`exporter/checkpoints/test_fuzz.py`). Here are as many as fit into seconds; `make fuzz` reads more.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import moexport
import numpy as np
import pytest
from moexport.bench import results
from moexport.bench.data import read_image
from moexport.bench.report.compare import compare
from moexport.bench.report.page import html
from moexport.bench.report.text import rows_table, to_csv, to_markdown
from moexport.bench.results import Accuracy, ModelInfo, OutputParity, Perplexity, Results, Row
from moexport.calibration.table import CalibrationTable, is_table
from moexport.commands.inspect import bundle_text, engine_text
from moexport.common.files import sha256
from moexport.common.latency import summarise
from moexport.data.feeds import batches, count
from moexport.errors import MoexportError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.destination import check_destination
from moexport.exporter.bundle.manifest import FileRecord, Manifest
from moexport.exporter.bundle.substitutes import SUBSTITUTES_FILE, read_substitutes
from moexport.exporter.bundle.verify import checks
from moexport.exporter.checkpoints.load import load
from moexport.exporter.checkpoints.settings import read_config
from moexport.exporter.model import TensorSpec
from moexport.exporter.session import SessionOptions
from moexport.exporter.tensorrt.plan_file import engine_facts
from moexport.plugins.studies.edits import read_edits
from moexport.plugins.triton.repository import write_repository
from moexport.plugins.triton.request import ServingBackend, TritonRequest
from moexport.plugins.tune.recipe import LayerRecipe, Recipe, read_recipe
from moexport.tests.calibration.reading import labelled_batches
from moexport.tests.command import run
from moexport.tests.exporter.tensorrt.engines import with_plan
from moexport.tests.hard.fuzzing import Subject, attempt, fuzz
from moexport.tests.recorded import DATA
from PIL import Image
from safetensors.numpy import save_file

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).standard_normal((3, 5, 24)).astype(np.float32)
LAYER = (DATA / "soft_moe_fkodom" / "weights.pt", "--set", "version=0.2.0")

# --- bundles -----------------------------------------------------------------------------------


def written(folder: Path, *options: str | Path) -> Path:
    """A small bundle, fast to read: one layer of six experts; beside it, what it computes of X."""
    folder.mkdir(parents=True)
    np.savez(folder / "x.npz", input=X)
    outcome = run(
        "export", *LAYER, "-o", folder / "out", "-q", "--data", folder / "x.npz", *options
    )
    assert outcome.code == 0, outcome.err
    np.save(folder / "y.npy", computed(Bundle.open(folder / "out")))
    return folder / "out"


def bundles(folder: Path) -> list[Path]:
    return [
        written(folder / "fp32", "--lowering", "gather", "--k", "input") / "manifest.json",
        written(folder / "int8", "--precision", "int8", "--k", "2") / "manifest.json",
    ]


def computed(bundle: Bundle) -> np.ndarray:
    session = bundle.session(options=SessionOptions(threads=1))
    y: np.ndarray = session(X, 2 if session.takes_k else None)
    return y


def run_as_written(manifest: Path) -> None:
    """Opens a bundle as `run` does: where it computes, that is what was exported."""
    y = computed(Bundle.open(manifest.parent))
    if not np.array_equal(y, np.load(manifest.parent.parent / "y.npy")):
        raise AssertionError("damaged files computed something else")


def looked_at(manifest: Path) -> None:
    """Reads a manifest as `inspect`, `verify` and an export to the same place do."""
    try:
        check_destination(manifest.parent, force=True)
    finally:
        record = Manifest.read(manifest.parent)
        bundle_text(manifest.parent, record)
        record.to_json()
        for _ in checks(manifest.parent, record):
            pass


def run_unchecked(manifest: Path) -> None:
    """Runs whatever graph is there, as `run --no-check` does."""
    computed(Bundle.open(manifest.parent, check=False))


def fitting(folder: Path) -> Manifest:
    """The manifest of a bundle as if its files were as they should be, hashes and all."""
    record = Manifest.read(folder)
    files = {
        name: FileRecord(sha256(folder / name), (folder / name).stat().st_size)
        for name in record.files
        if (folder / name).is_file()
    }
    return replace(record, files=files)


def verified(manifest: Path) -> None:
    """Verifies a bundle whose manifest was made to fit the damage."""
    record = fitting(manifest.parent)
    made = list(checks(manifest.parent, record))
    if all(check.passed for check in made) and len(made) <= len(record.files) + 2:
        raise AssertionError("nothing was compared")


def served_bundles(folder: Path) -> list[Path]:
    """Bundles for Triton: of a k that requests choose, of one k, and of an engine of TensorRT."""
    with_k = written(folder / "k", "--lowering", "gather", "--k", "input")
    plain = written(folder / "plain", "--k", "2")
    engine = written(folder / "engine", "--target", "tensorrt", "--no-engine", "--k", "2")
    with_plan(engine, profiles=[{"input": [[1, 1, 24], [1, 5, 24], [32, 1024, 24]]}])
    return [each / "manifest.json" for each in (with_k, plain, engine)]


def served(manifest: Path) -> None:
    """Writes models for Triton of a bundle whose manifest fits the damage."""
    bundle = Bundle(manifest.parent, fitting(manifest.parent))
    for backend in get_args(ServingBackend):
        with tempfile.TemporaryDirectory() as place, suppress(MoexportError):
            write_repository([bundle], Path(place) / "m", TritonRequest(backend=backend))


SERVED = Subject(served_bundles, served, ("manifest.json", "model.onnx", "parity.npz"))


BUNDLES = Subject(bundles, run_as_written)
MANIFESTS = Subject(bundles, looked_at, ("manifest.json",))
GRAPHS = Subject(bundles, run_unchecked, ("model.onnx", "weights.bin"))
REFERENCES = Subject(bundles, verified, ("parity.npz", "model.onnx", "calibration.json"))


def plans(folder: Path) -> list[Path]:
    """A bundle that lists an engine, which is nothing but a header."""
    bundle = written(folder / "rtx", "--target", "tensorrt-rtx", "--no-engine")
    content = b"vtrt".ljust(16, b"\0") + struct.pack("<Q4B", 999, 1, 7, 1, 0)
    (bundle / "engine.plan").write_bytes(content.ljust(999, b"\1"))
    layers = {"layers": [{"name": "a", "kind": "matmul", "precision": "fp32"}]}
    (bundle / "engine.json").write_text(json.dumps(layers))
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in ("engine.plan", "engine.json"):
        size = (bundle / name).stat().st_size
        manifest["files"][name] = {"sha256": sha256(bundle / name), "bytes": size}
    shapes = [[1, 1, 24], [1, 5, 24], [32, 1024, 24]]
    manifest["engines"] = [
        {
            **{"file": "engine.plan", "graph": "model.onnx", "flavour": "tensorrt-rtx"},
            **{"version": "1.7.1", "compute_capabilities": ["8.9"], "device": None},
            **{"precision": {"fp32": 1}, "profiles": [{"input": shapes}], "options": {}},
            **{"settings": {"tf32": False}, "layers": "engine.json", "key": "0" * 64},
            **{"seconds": 1.5, "peak_memory_bytes": 10**9},
        }
    ]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return [bundle / "manifest.json"]


def engine_looked_at(manifest: Path) -> None:
    """Reads an engine as `inspect` and `run --engine` do on a machine without a GPU."""
    engine_text(engine_facts(manifest.parent / "engine.plan"))
    record = Bundle.open(manifest.parent).engine_record("tensorrt-rtx")
    record.check_fits(X.shape, None)


PLANS = Subject(plans, engine_looked_at, ("manifest.json", "engine.plan", "engine.json"))

# --- tables, results and what is written by hand ------------------------------------------------


def tables(folder: Path) -> list[Path]:
    return [written(folder / "int8", "--precision", "int8") / "calibration.json"]


def table_read(path: Path) -> None:
    is_table(path)
    table = CalibrationTable.read(path)
    table.to_json()
    for key in table.ranges:
        table.range(key)


TABLES = Subject(tables, table_read, ("calibration.json",))


def _row(engine: str, k: int, ms: float, **changes: Any) -> Row:
    quality: dict[str, Any] = {
        "accuracy": Accuracy(0.9, 0.99, 360, 1.0),
        "parity": OutputParity(1e-6, 1.0),
    }
    return Row(engine, k, 16, 1, "digits", latency_ms=summarise([[ms], [ms]]), **quality | changes)


def result_files(folder: Path) -> list[Path]:
    found = Results(
        models=(ModelInfo("digits", "soft-moe-mnist", "digits.pt", 318_000),),
        rows=(
            _row("pytorch-eager", 16, 3.0),
            _row("onnxruntime", 4, 1.0, lowering="grouped", provider="cpu", throughput=1e3),
            _row("onnxruntime", 8, 2.0, lowering="grouped", accuracy=None, error="no such op"),
            _row("onnxruntime", 2, 0.5, accuracy=None, perplexity=Perplexity(9.0, 0.9, 999)),
        ),
        environment={"python": "3.11", "packages": {"torch": "2.13"}, "gpu": None},
        protocol={"rounds": 5, "round_s": 0.2, "warmup": 3, "samples": 360, "labelled": True},
        command="moexport bench digits.pt --k 4,2",
        created="2030-01-02T03:04:05+00:00",
    )
    (folder / "results").mkdir(parents=True)
    results.write(found, folder / "results" / "results.json")
    return [folder / "results" / "results.json"]


def results_read(path: Path) -> None:
    """Makes every view of results but the figures, which take long."""
    found = results.read(path)
    comparison = compare(found, found)
    for view in (html(found, comparison), to_markdown(found, comparison), rows_table(found)):
        view.encode()
    to_csv(found).encode()
    results.to_json(found).encode()


def reported(path: Path) -> None:
    """`report`, with its figures."""
    moexport.report(path, path.parent.parent / "report" / "page.html", compare=path)


RESULTS = Subject(result_files, results_read, ("results.json",))
REPORTS = Subject(result_files, reported, ("results.json",))


def rewrites(folder: Path) -> list[Path]:
    entry = {"layer": "blocks.0.mlp", "output": 3, "coefficients": [[0.5, 0.25]], "lambda": 0.1}
    (folder / "rewrites").mkdir(parents=True)
    (folder / "rewrites" / "edits.json").write_text(json.dumps([entry, entry]))
    return [folder / "rewrites" / "edits.json"]


def rewrites_read(path: Path) -> None:
    read_edits((), path).records()


REWRITES = Subject(rewrites, rewrites_read)

CONFIG = {
    "json": '{"num_heads": 3, "patch": [4, 4], "rest": {"eps": 1e-5, "act": "gelu"}}',
    "toml": 'num_heads = 3\npatch = [4, 4]\nwhen = 2030-01-01\n[rest]\neps = 1e-5\nact = "gelu"\n',
    "yaml": "num_heads: 3\npatch: [4, 4]\nwhen: 2030-01-01\nrest: &a {eps: 1e-5, b: !!int 3}\n",
}


def configs(folder: Path) -> list[Path]:
    for name, text in CONFIG.items():
        (folder / name).mkdir(parents=True)
        (folder / name / f"config.{name}").write_text(text)
    return [folder / name / f"config.{name}" for name in CONFIG]


CONFIGS = Subject(configs, read_config)


def feeds(folder: Path) -> list[Path]:
    """Paths to a folder, to arrays in an archive and to arrays in their own files."""
    for name in ("npz", "labelled", "npy", "fortran"):
        (folder / name).mkdir(parents=True)
    np.savez(folder / "npz" / "x.npz", input=X)
    half = X.astype(np.float16)
    np.savez_compressed(folder / "labelled" / "x.npz", input=half, label=np.arange(3))
    np.save(folder / "npy" / "x.npy", X)
    np.save(folder / "fortran" / "x.npy", np.asfortranarray(X))
    return [
        *(folder / "npz" / "x.npz", folder / "labelled" / "x.npz"),
        *(folder / "npy" / "x.npy", folder / "fortran" / "x.npy"),
    ]


def feed_read(path: Path) -> None:
    """Reads a feed in every way; more numbers than the file holds are none."""
    told = count(path, "input")
    read = sum(len(batch) for batch in batches(path, "input"))
    if told != read:
        raise AssertionError(f"{told} inputs were told and {read} read")
    for _ in labelled_batches(path, "input"):
        pass
    name = zipfile.ZipFile(path).testzip() if path.suffix == ".npz" else None
    if name in ("input.npy", "label.npy"):  # an array that damage renamed is not read
        raise AssertionError(f"{name} is damaged, and was read")
    if path.suffix == ".npy":
        for _ in batches(path.parent, "input"):
            pass


FEEDS = Subject(feeds, feed_read)


def shards(folder: Path) -> list[Path]:
    """Tars in the two forms that Python writes with headers of their own, and two Parquet files."""
    import pyarrow as pa
    from pyarrow import parquet

    for name in ("gnu", "pax", "tensor", "lists"):
        (folder / name).mkdir(parents=True)
    for name, form in (("gnu", tarfile.GNU_FORMAT), ("pax", tarfile.PAX_FORMAT)):
        with tarfile.open(folder / name / "x.tar", "w", format=form) as archive:
            for i, row in enumerate(X):
                content = io.BytesIO()
                np.save(content, row)
                for ending, data in (("npy", content.getvalue()), ("cls", b"%d" % i)):
                    info = tarfile.TarInfo(f"{'é' * 60 * (i == 1)}{i}.{ending}")
                    info.size, info.mtime = len(data), 0.5
                    archive.addfile(info, io.BytesIO(data))
    (folder / "gnu" / "sizes.json").write_text('{"x.tar": 3}')
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(X)
    table = pa.table({"input": column, "label": np.arange(3)})
    parquet.write_table(table, folder / "tensor" / "x.parquet", write_page_checksum=True)
    table = pa.table({"input": X.tolist(), "image": [b"abc"] * 3, "label": np.arange(3)})
    parquet.write_table(table, folder / "lists" / "x.parquet", compression="zstd")
    kinds = {"gnu": "tar", "pax": "tar", "tensor": "parquet", "lists": "parquet"}
    return [folder / name / f"x.{kind}" for name, kind in kinds.items()]


def shard_read(path: Path) -> None:
    for _ in batches(path, "input"):
        pass
    for _ in labelled_batches(path, "input"):
        pass


SHARDS = Subject(shards, shard_read)


IMAGE = TensorSpec("input", "float32", ("batch", 3, 16, 16))


def images(folder: Path) -> list[Path]:
    """An image in each format that is read."""
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
    for kind in ("png", "jpg", "webp", "bmp", "tiff", "ppm"):
        (folder / kind).mkdir(parents=True)
        Image.fromarray(pixels).save(folder / kind / f"x.{kind}")
    return [each / f"x.{each.name}" for each in sorted(folder.iterdir())]


def image_read(path: Path) -> None:
    assert read_image(path, IMAGE, "unit").shape == (3, 16, 16)


IMAGES = Subject(images, image_read)


def recipes(folder: Path) -> list[Path]:
    """A recipe with what takes the places of experts beside it."""
    (folder / "recipe").mkdir(parents=True)
    layer = LayerRecipe(k=2, precision="int8", lowering="grouped", experts=(0, 2), constant=True)
    recipe = Recipe(
        model="0" * 64,
        data="1" * 64,
        target="onnx",
        batch="1:8",
        tokens="1:1024",
        opset=21,
        precision="int8",
        quantize="experts",
        layers={"blocks.0.mlp": layer, "blocks.1.mlp": replace(layer, experts=())},
        contract={"loss": 0.01, "confirmed": True, "by": ["layer", "model"]},
    )
    recipe.write(folder / "recipe" / "recipe.yaml")
    numbers = {"a/constants": X[0], "b/constants": X[1].astype(np.float16)}
    save_file(numbers, folder / "recipe" / SUBSTITUTES_FILE)
    return [folder / "recipe" / "recipe.yaml"]


def test_a_recipe_without_a_lowering_is_refused(tmp_path: Path) -> None:
    (path,) = recipes(tmp_path)
    path.write_text(path.read_text().replace("lowering: grouped", "lowering: ''", 1))
    with pytest.raises(UsageError, match=r"layer blocks\.0\.mlp has no lowering"):
        read_recipe(path)


def test_a_recipe_for_a_target_that_nothing_brings_is_refused(tmp_path: Path) -> None:
    (path,) = recipes(tmp_path)
    path.write_text(path.read_text().replace("target: onnx", "target: ort-board", 1))
    with pytest.raises(UsageError, match="target is 'ort-board', which no installed"):
        read_recipe(path)


def recipe_read(path: Path) -> None:
    recipe = read_recipe(path)
    recipe.text()
    _ = recipe.edits
    for array in read_substitutes(path.parent).values():
        array.sum()


RECIPES = Subject(recipes, recipe_read)


def transformers_folders(folder: Path) -> list[Path]:
    """Folders of `transformers` with small weights, of which `config.json` is damaged."""
    from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save

    names = ("mixtral", "qwen2_moe", "deepseek_v3")
    return [save(ARCHITECTURES[name], folder / name) / "config.json" for name in names]


def transformers_read(path: Path) -> None:
    load(path.parent)


TRANSFORMERS = Subject(transformers_folders, transformers_read, ("config.json",))


@pytest.mark.parametrize(
    ("subject", "files"),
    [
        pytest.param(BUNDLES, 100, id="bundles"),
        pytest.param(MANIFESTS, 150, id="manifests"),
        pytest.param(GRAPHS, 150, id="graphs"),
        pytest.param(REFERENCES, 60, id="references"),
        pytest.param(PLANS, 200, id="plans"),
        pytest.param(SERVED, 150, id="served"),
        pytest.param(TABLES, 300, id="tables"),
        pytest.param(RESULTS, 300, id="results"),
        pytest.param(REPORTS, 3, id="reports"),
        pytest.param(REWRITES, 500, id="rewrites"),
        pytest.param(CONFIGS, 300, id="configs"),
        pytest.param(FEEDS, 400, id="feeds"),
        pytest.param(SHARDS, 400, id="shards"),
        pytest.param(IMAGES, 400, id="images"),
        pytest.param(RECIPES, 300, id="recipes"),
        pytest.param(TRANSFORMERS, 40, id="transformers"),
    ],
)
def test_damaged_files_are_read_or_refused(subject: Subject, files: int, tmp_path: Path) -> None:
    findings = [each for each in fuzz(subject, tmp_path, 1, range(files)) if each is not None]
    assert findings == []


def test_a_reference_with_other_keys_is_refused_or_taken(tmp_path: Path) -> None:
    (manifest,) = [each for each in bundles(tmp_path) if "int8" in str(each)]
    path = manifest.with_name("parity.npz")
    with np.load(path) as archive:
        arrays = dict(archive)
    selected = next(name for name in arrays if name.startswith("selected/"))
    margin = selected.replace("selected", "margin")
    x, sets, gaps = arrays["x"], arrays[selected], arrays[margin]
    found = []
    for changes in (
        *({f"x/{name}": x} for name in ("other", "input", "", "k", "output")),
        *({f"y/{name}": x} for name in ("other", "output", "")),
        {"selected/other": sets, "margin/other": gaps},
        {"selected/other": sets},
        {"kept/other": np.array(10**6)},
        {"kept/other": np.array([1, 2])},
        {margin: np.zeros((len(x), 7))},
        {selected: sets[..., :1]},
        {selected: sets[:, 0]},
        {selected: sets.astype(np.float32)},
        {"rounded/other": sets},
        {"dense": x},
        {"x": x[..., :-1]},
    ):
        np.savez(path, **(arrays | changes))
        found.append(attempt(verified, manifest))
    assert [each for each in found if each is not None] == []
