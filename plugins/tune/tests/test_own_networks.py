"""A search of a user's own network ends in a bundle, or in a recipe on disk that makes it."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.common import timing
from moexport.common.console import Silent
from moexport.errors import BundleError, CalibrationError
from moexport.exporter.job import export_job
from moexport.exporter.model import Model, fingerprint
from moexport.exporter.options import ExportOptions
from moexport.plugins.demo.digits import load_digits
from moexport.plugins.tune.recipe import LayerRecipe, Recipe, read_recipe, recipe_options
from moexport.tests.command import run
from moexport.tests.recorded import VIT_SETS, read_case

pytestmark = pytest.mark.slow

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F


class Mixture(nn.Module):
    """A Soft MoE layer, named as no published code names it."""

    def __init__(self, dim=16, hidden=256, experts=4):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(dim, experts) / 4)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / 8)

    def forward(self, x):
        logits = x @ self.queries
        slots = torch.einsum("bmn,bmd->bnd", logits.softmax(dim=1), x)
        y = torch.einsum("bnd,ndh->bnh", slots, self.up).relu()
        y = torch.einsum("bnh,nhd->bnd", y, self.down)
        return torch.einsum("bmn,bnd->bmd", logits.softmax(dim=2), y)


class Published(nn.Module):
    """A Soft MoE layer with the names of a published code."""

    def __init__(self, dim=16, hidden=64, experts=4):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(dim, experts, 1) / 4)
        self.scale = nn.Parameter(torch.full((1,), 4.0))
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x):
        x = F.normalize(x, dim=-1)
        logits = torch.einsum("bmd,dnp->bmnp", x, self.scale * F.normalize(self.phi, dim=0))
        slots = torch.einsum("bmd,bmnp->bnpd", x, logits.softmax(1))
        y = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], 1)
        return torch.einsum("bnpd,bmnp->bmd", y, logits.flatten(2).softmax(-1).view_as(logits))


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Multilinear(nn.Module):
    """A muMoE layer of CP factors."""

    def __init__(self, dim=16, experts=4, rank=24):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.expert = nn.Parameter(torch.randn(experts, rank) / 2)
        self.input = nn.Parameter(torch.randn(dim, rank) / 2)
        self.output = nn.Parameter(torch.randn(dim, rank) / 2)

    def forward(self, x):
        return (self.gate(x).softmax(-1) @ self.expert * (x @ self.input)) @ self.output.T


class Sparse(nn.Module):
    """Experts that a router of its own chooses for each token."""

    def __init__(self, dim=16, hidden=32, experts=4):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) / 4)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) / 8)

    def choose(self, x, k=2):
        weights, index = self.router(x).softmax(-1).topk(k, -1)
        return index, weights

    def forward(self, x):
        index, weights = self.choose(x)
        y = torch.einsum("...d,ndh->...nh", x, self.w1).relu()
        y = torch.einsum("...nh,nhd->...nd", y, self.w2)
        y = y.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))
        return (y * weights[..., None]).sum(-2)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed = nn.Conv2d(1, 16, 7, stride=7)
        self.mixture = layer
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        return self.head((x + self.mixture(x)).mean(dim=1))


def net(layer="Mixture"):
    torch.manual_seed(0)
    return Net(globals()[layer]())


@moexport.adapts(Mixture)
def soft_moe(layer):
    return moexport.SoftMoE(phi=layer.queries, w1=layer.up, w2=layer.down, activation="relu")


@moexport.adapts(Multilinear)
def mumoe(layer):
    weights = [layer.expert, layer.input, layer.output]
    return moexport.MuMoE(gates=[layer.gate], weights=weights, norm="none", activation="softmax")


@moexport.adapts(Sparse)
def routed(layer):
    return moexport.Experts(
        router=layer.choose, w1=layer.w1, w2=layer.w2, gate="none", activation="relu")
'''


@pytest.fixture(scope="module", autouse=True)
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_digits.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def data() -> LabelledData:
    return load_digits(test_share=0.5).test.head(400)


@pytest.fixture(scope="module")
def weights(data: LabelledData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a network with the `Mixture`, which was trained a little on the data themselves."""
    network = importlib.import_module("own_digits").net()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    assert data.labels is not None
    x, y = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    path = tmp_path_factory.mktemp("weights") / "net.pt"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test does not depend on which point is the fastest."""
    monkeypatch.setattr(timing, "MAX_WAIT_S", 0.0)


class Occupies(Silent):
    """Writes a file at the bundle's place after the search."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        if text == "confirming":
            self.place.write_text("mine")


@pytest.mark.usefixtures("untimed")
def test_fewer_experts_in_int8_of_a_layer_with_an_adapter_are_written_and_never_lost(
    weights: Path, data: LabelledData, tmp_path: Path
) -> None:
    destination, report = tmp_path / "out", tmp_path / "report"
    model = moexport.load("own_digits:net", weights=weights, example=data.inputs)

    def tune(progress: Silent) -> Path:
        tuned = moexport.tune(
            model,
            data,
            destination,
            keep="70%",
            max_bytes="41kB",  # neither all experts in INT8 nor one in FP32
            precision="fp32,int8",
            threads=1,
            report=report,
            progress=progress,
        )
        return tuned.bundle.path

    with pytest.raises(BundleError, match="a file with this name exists") as caught:
        tune(Occupies(destination))
    kept = report / "recipe" / "recipe.yaml"
    recipe = read_recipe(kept)
    (layer,) = recipe.layers.values()
    assert layer.experts and layer.precision == "int8"
    assert recipe.calibration
    line = re.search("`moexport (.*?)`", str(caught.value.hint))
    assert line is not None
    outcome = run(*shlex.split(line[1]))
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "out-again" / "recipe.yaml").read_bytes() == kept.read_bytes()
    assert destination.read_text() == "mine"

    npz = tmp_path / "data.npz"
    assert data.labels is not None
    np.savez(npz, input=data.inputs, label=data.labels)
    source = ("own_digits:net", "--weights", weights, "--data", npz)
    outcome = run("export", *source, "--recipe", kept, "-o", tmp_path / "replayed")
    assert outcome.code == 0, outcome.err

    destination.unlink()
    bundle = tune(Silent())
    assert not kept.parent.exists()
    for name in ("model.onnx", "weights.bin", "recipe.yaml", "calibration.json"):
        assert (bundle / name).read_bytes() == (tmp_path / "replayed" / name).read_bytes(), name
    assert run("verify", bundle).code == 0
    results = moexport.bench([model, bundle], data=data, round_s=0.0, memory=False, parts=False)
    assert {row.precision for row in results.rows if row.model == "out"} == {"fp32", "int8"}


@pytest.mark.usefixtures("untimed")
def test_a_search_without_a_report_keeps_its_recipe_beside_the_bundle(
    data: LabelledData, tmp_path: Path
) -> None:
    (tmp_path / "out-recipe").mkdir()
    (tmp_path / "out-recipe" / "recipe.yaml").write_text("mine")
    model = own("Multilinear", data)
    with pytest.raises(BundleError) as caught:
        moexport.tune(
            model,
            data,
            tmp_path / "out",
            keep="50%",
            metric="agreement",
            precision="fp32,int8",
            threads=1,
            progress=Occupies(tmp_path / "out"),
        )
    kept = tmp_path / "out-recipe-2" / "recipe.yaml"
    assert str(kept) in str(caught.value.hint)
    assert (tmp_path / "out-recipe" / "recipe.yaml").read_text() == "mine"
    again = moexport.export(model, tmp_path / "again", recipe=kept)
    assert again.manifest.contract["kept"] >= 0.5


@pytest.mark.usefixtures("untimed")
def test_the_line_that_exports_again_runs_as_printed(data: LabelledData, tmp_path: Path) -> None:
    assert data.labels is not None
    np.savez(tmp_path / "the data.npz", input=data.inputs, label=data.labels)
    outcome = run(
        *("tune", "own_digits:net", "--set", "layer=Multilinear", "--metric", "agreement"),
        *("--data", tmp_path / "the data.npz", "--keep", "50%", "--precision", "fp32"),
        *("--threads", "1", "-o", tmp_path / "out"),
    )
    assert outcome.code == 0, outcome.err
    (line,) = [text for text in outcome.out.splitlines() if text.startswith("reproduce: moexport ")]
    outcome = run(*shlex.split(line.removeprefix("reproduce: moexport ")))
    assert outcome.code == 0, outcome.err
    for name in ("model.onnx", "weights.bin", "recipe.yaml"):
        again = (tmp_path / "out-again" / name).read_bytes()
        assert again == (tmp_path / "out" / name).read_bytes(), name


@pytest.mark.usefixtures("untimed")
def test_a_recipe_holds_the_settings_that_the_model_was_read_with(tmp_path: Path) -> None:
    """The printed command needs neither `num_heads` nor other settings that the shapes lack."""
    case = read_case("soft_moe_vit")
    x = np.random.default_rng(0).standard_normal((400, *case.x.shape[1:]), dtype=np.float32)
    np.savez(tmp_path / "data.npz", input=x)
    outcome = run(
        *("tune", case.weights, *VIT_SETS, "--metric", "agreement", "--keep", "50%"),
        *("--data", tmp_path / "data.npz", "--precision", "fp32", "--threads", "1"),
        *("-o", tmp_path / "out"),
    )
    assert outcome.code == 0, outcome.err
    recipe = tmp_path / "out" / "recipe.yaml"
    assert run("export", case.weights, "-o", tmp_path / "none").code == 1
    outcome = run("export", case.weights, "--recipe", recipe, "-o", tmp_path / "replayed")
    assert outcome.code == 0, outcome.err
    for name in ("model.onnx", "weights.bin", "recipe.yaml"):
        replayed = (tmp_path / "replayed" / name).read_bytes()
        assert replayed == (tmp_path / "out" / name).read_bytes(), name
    other = ("--set", "num_heads=2", "--recipe", recipe, "-o", tmp_path / "other")
    outcome = run("export", case.weights, *other)
    assert outcome.code == 2
    assert "other weights or another configuration" in outcome.error


def own(layer: str, data: LabelledData) -> Model:
    return moexport.load("own_digits:net", config={"layer": layer}, example=data.inputs)


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        ("Mixture", LayerRecipe(k=2, precision="int8", lowering="grouped", experts=(0, 2))),
        ("Published", LayerRecipe(k=1, precision="int8", lowering="grouped", experts=(0, 2))),
        ("Multilinear", LayerRecipe(k=1, precision="int8", lowering="factorised", merged=True)),
        ("Sparse", LayerRecipe(k=1, precision="int8", lowering="grouped")),
    ],
)
def test_the_ranges_of_a_network_serve_what_is_reduced_or_computes_fewer(
    layer: str, change: LayerRecipe, data: LabelledData
) -> None:
    model = own(layer, data)
    table = moexport.calibrate(model, data.inputs[:32])
    (name,) = model.layers
    recipe = Recipe(
        model=fingerprint(model),
        data="",
        target="ort-cpu",
        batch="1:1:32",
        tokens="1:196:1024",
        opset=20,
        precision="int8",
        quantize="experts",
        layers={name: change},
    )
    trained = model.layers[name]
    substitutes = {}
    if change.merged:
        substitutes = {f"{name}:0": np.zeros((17, 16), np.float32)}
    options = replace(ExportOptions(verify=False), calibration=table)
    job = export_job(model, recipe_options(recipe, options, substitutes))
    assert job.table is table
    # Those of a network with other weights are refused.
    next(trained.parameters()).data.add_(1e-3)
    with pytest.raises(CalibrationError, match="another model"):
        export_job(model, replace(options, precision="int8"))
