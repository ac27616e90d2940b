"""A search finds a faster bundle, confirms it on unseen data, and its recipe is exported again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnxruntime
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.common import timing
from moexport.common.console import Progress, Silent
from moexport.common.files import sha256
from moexport.common.threads import with_threads
from moexport.common.writing import exclusive_folder, exclusive_place
from moexport.errors import MoexportError, ParityError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.substitutes import SUBSTITUTES_FILE, read_substitutes
from moexport.exporter.export import write_bundle
from moexport.exporter.job import export_job
from moexport.exporter.model import Model, edited
from moexport.exporter.options import ExportOptions
from moexport.exporter.plan import plan_traced
from moexport.exporter.trace import trace
from moexport.graphs.layers.soft_moe import soft_moe_layers
from moexport.graphs.targets import CUDA_PROVIDER, Precision
from moexport.plugins.demo.digits import Digits, Training, load_digits, save, train
from moexport.plugins.tune.accuracy.confirm import ContractError, passing
from moexport.plugins.tune.recipe import LayerRecipe, read_recipe
from moexport.plugins.tune.request import TuneRequest
from moexport.plugins.tune.space import BACKBONE, Point, job_of, space_of
from moexport.plugins.tune.substitutes.substitutes import FOLDER
from moexport.plugins.tune.tune import Tuned, plan_search
from moexport.tests.command import run
from moexport.tests.exporter.families.states import VIT, vit_state
from moexport.tests.recorded import DATA, read_case
from moexport.tests.threads import SlowOnManyThreads
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(test_share=0.5)


@pytest.fixture(scope="module")
def checkpoint(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that needs few of its 16 experts."""
    path = tmp_path_factory.mktemp("tune") / "digits.pt"
    asked = Training(16, hidden=16, normalise=True, scale=16.0, epochs=6, batch=64)
    save(train(asked, digits.train), path)
    return path


class Steps(Silent):
    """Records the steps."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        self.told.append(text)


class EndedAt(Silent):
    """Ends a search at a step."""

    def __init__(self, text: str) -> None:
        self.text = text

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        if text.startswith(self.text):
            raise KeyboardInterrupt


MAX_BYTES = 300_000
"""A bound below the size of all experts, so that a busy machine does not matter."""


def search(checkpoint: Path, data: LabelledData, folder: Path, progress: Progress) -> Tuned:
    """A search in FP32 for 97% with fewer experts, with its report next to the bundle."""
    return moexport.tune(
        moexport.load(checkpoint),
        data,
        folder / "out",
        keep="97%",
        max_bytes=MAX_BYTES,
        precision="fp32",
        threads=1,
        report=folder / "report",
        progress=progress,
    )


@pytest.fixture(scope="module")
def tuned(checkpoint: Path, digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A search that was interrupted and continued."""
    folder = tmp_path_factory.mktemp("tuned")

    with pytest.raises(KeyboardInterrupt):
        search(checkpoint, digits.test, folder, EndedAt("searching"))
    assert not (folder / "out").exists()
    steps = Steps()
    found = search(checkpoint, digits.test, folder, steps)
    # Nothing is measured twice.
    assert not [each for each in steps.told if each.startswith("measuring")]
    assert any(each.startswith("continuing") for each in steps.told)
    return found


@pytest.mark.path
def test_the_bundle_keeps_what_was_asked_on_inputs_that_the_search_did_not_see(
    tuned: Tuned, digits: Digits, checkpoint: Path
) -> None:
    quality = tuned.chosen.quality
    assert quality.low >= 0.97
    assert tuned.searching + quality.inputs == len(digits.test)
    contract = tuned.bundle.manifest.contract
    assert contract["interval"] == [quality.low, quality.high]
    assert contract["asked"]["keep"] == 0.97
    # The page has the kept share and the accuracy, each with its interval: Wilson's, whose ends p
    # solve |p - a| = z · sqrt(p (1 - p) / n).
    accuracy, n = contract["accuracy"], contract["inputs"]
    assert accuracy * n == pytest.approx(round(accuracy * n))
    low, high = contract["accuracy_interval"]
    assert low < accuracy < high
    for end in (low, high):
        assert abs(end - accuracy) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n))
    page = (tuned.bundle.path / "README.md").read_text(encoding="utf-8")
    assert (
        f"On {n} inputs that the search of `moexport tune` did not use, this bundle keeps" in page
    )
    assert f"(95% interval {quality.low:.1%} to {quality.high:.1%})" in page
    assert f"an accuracy of {accuracy:.1%} ({low:.1%} to {high:.1%}); PyTorch has" in page
    assert "The requirement was to keep 97% of the accuracy" in page
    session = tuned.bundle.session()
    right = (session(digits.test.inputs).argmax(axis=1) == digits.test.labels).mean()
    bundle_of_all = moexport.load(checkpoint)
    with torch.inference_mode():
        scores = bundle_of_all.module(torch.from_numpy(digits.test.inputs)).numpy()
    assert right / (scores.argmax(axis=1) == digits.test.labels).mean() >= 0.97


def test_dropped_experts_are_not_in_the_file_and_the_others_contribute_what_they_did(
    tuned: Tuned, checkpoint: Path, digits: Digits, tmp_path: Path
) -> None:
    recipe = read_recipe(tuned.bundle.path / "recipe.yaml")
    (name,) = recipe.layers
    kept = (1, 5, 8, 12)
    for k in (4, 2):
        fewer = replace(
            recipe,
            precision="fp32",
            calibration="",
            substitutes="",
            layers={name: LayerRecipe(k, "fp32", "gather", kept)},
        )
        fewer.write(tmp_path / "recipe.yaml")
        bundle = moexport.export(
            moexport.load(checkpoint),
            tmp_path / f"out{k}",
            recipe=tmp_path / "recipe.yaml",
            data=digits.test.inputs[:32],
        )
        model = moexport.load(checkpoint)
        layer = soft_moe_layers(model.module)[name]
        layer.keep, layer.chooser = k, chosen_among(kept)
        wanted = model.module(torch.from_numpy(digits.test.inputs[:32])).detach().numpy()
        found = bundle.session()(digits.test.inputs[:32])
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
        assert bundle.manifest.layers[0].experts == 4
        assert bundle.manifest.files["weights.bin"].bytes < tuned.base.bytes / 2
        again = Bundle.open(bundle.path)
        assert all(check.passed for check in again.verify())


def chosen_among(kept: tuple[int, ...]) -> Any:
    known = torch.tensor(kept)

    def choose(scores: torch.Tensor, k: int) -> torch.Tensor:
        return known[scores[:, known].topk(k, dim=1).indices].sort(dim=1).values

    return choose


def test_the_front_rises_in_what_is_kept_with_the_time(tuned: Tuned) -> None:
    kept = [trial.quality.kept for trial in tuned.front]
    times = [trial.ms for trial in tuned.front]
    assert times == sorted(times, reverse=True)
    assert kept == sorted(kept, reverse=True)


def test_a_recipe_is_exported_again_bit_for_bit(
    tuned: Tuned, checkpoint: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    recipe = tuned.bundle.path / "recipe.yaml"
    outcome = run("export", checkpoint, "--recipe", recipe, "-o", again)
    assert outcome.code == 0, outcome.err
    for name in ("model.onnx", "weights.bin", "recipe.yaml"):
        assert (again / name).read_bytes() == (tuned.bundle.path / name).read_bytes(), name
    assert read_recipe(recipe).data
    assert all(check.passed for check in Bundle.open(again).verify())


def test_dropped_experts_leave_constants_which_lie_beside_the_recipe(
    tuned: Tuned, checkpoint: Path, digits: Digits, tmp_path: Path
) -> None:
    place = tuned.bundle.path
    recipe, constants = read_recipe(place / "recipe.yaml"), read_substitutes(place)
    (name,) = recipe.layers
    kept = recipe.layers[name].experts
    assert recipe.substitutes == sha256(place / SUBSTITUTES_FILE)
    assert constants[name].shape[0] == 16 - len(kept)
    assert tuned.bundle.manifest.edits == [
        {"edit": "keep", "layer": name, "experts": [*kept], "constant": True}
    ]
    # The bundle is compared with the untouched model, not with one with constants.
    results = moexport.bench(
        [checkpoint, place], data=digits.test, round_s=0.0, memory=False, parts=False
    )
    (row,) = (row for row in results.rows if row.engine == "onnxruntime" and row.model == "out")
    (untouched,) = (row for row in results.rows if row.is_reference and row.model == "out")
    assert (untouched.k, untouched.experts) == (16, 16)
    assert (row.k, row.experts) == (recipe.layers[name].k, len(kept))
    with torch.inference_mode():
        scores = moexport.load(checkpoint).module(torch.from_numpy(digits.test.inputs)).numpy()
    of_bundle = tuned.bundle.session()(digits.test.inputs)
    assert np.abs(of_bundle - scores).max() > 0.01
    of_bundle_right, right = (
        int((each.argmax(axis=1) == digits.test.labels).sum()) for each in (of_bundle, scores)
    )
    assert row.kept is not None
    assert row.kept == pytest.approx(of_bundle_right / right)
    assert abs(row.kept - tuned.chosen.quality.kept) < 0.02


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda place: place.unlink(), "is not next to it"),
        (lambda place: place.write_bytes(place.read_bytes()[:-4]), "was changed, or belongs"),
    ],
)
def test_a_recipe_without_its_constants_is_refused(
    tuned: Tuned, checkpoint: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    for name in ("recipe.yaml", SUBSTITUTES_FILE):
        (tmp_path / name).write_bytes((tuned.bundle.path / name).read_bytes())
    damage(tmp_path / SUBSTITUTES_FILE)
    options = ("--recipe", tmp_path / "recipe.yaml", "-o", tmp_path / "out")
    outcome = run("export", checkpoint, *options)
    assert outcome.code == 2
    assert SUBSTITUTES_FILE in outcome.error
    assert said in outcome.error
    assert not (tmp_path / "out").exists()


def test_constants_that_changed_since_they_were_confirmed_are_not_written(
    checkpoint: Path, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "MAX_WAIT_S", 0.0)  # times do not matter here

    with pytest.raises(KeyboardInterrupt):
        search(checkpoint, digits.test, tmp_path, EndedAt("writing weights"))
    trained = [*(tmp_path / "report" / FOLDER).iterdir()]
    assert trained
    for path in trained:
        save_file({name: 2 * array for name, array in load_file(path).items()}, path)
    with pytest.raises(ContractError, match="were changed or deleted after"):
        search(checkpoint, digits.test, tmp_path, Silent())
    assert not (tmp_path / "out").exists()
    # Those of another search are never read.
    labels = digits.test.labels
    assert labels is not None
    other = LabelledData(digits.test.inputs[::-1].copy(), labels[::-1].copy())
    with pytest.raises(KeyboardInterrupt):
        search(checkpoint, other, tmp_path, EndedAt("trying each layer"))
    assert not (tmp_path / "report" / FOLDER).exists()


def test_a_graph_that_is_too_far_from_pytorch_gives_way_to_the_next_that_was_confirmed(
    checkpoint: Path, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def strict(*given: Any) -> Bundle:
        """Refuses the first graph."""
        asked.append(given)
        if len(asked) == 1:
            raise ParityError("model.onnx differs from PyTorch")
        return write_bundle(*given)

    monkeypatch.setattr("moexport.plugins.tune.tune.write_bundle", strict)
    steps = Steps()
    found = search(checkpoint, digits.test, tmp_path, steps)
    assert len(asked) == 2
    assert "skipped: model.onnx differs from PyTorch" in steps.told
    held = [each for each in passing(found.sequence, 0.97) if each.trial.bytes <= MAX_BYTES]
    assert found.chosen in held
    assert sum(each.trial.ms < found.chosen.trial.ms for each in held) == 1
    contract = found.bundle.manifest.contract
    assert contract is not None
    assert contract["kept"] == found.chosen.quality.kept


def test_constants_that_do_not_fit_the_layer_are_refused(tuned: Tuned, checkpoint: Path) -> None:
    recipe = read_recipe(tuned.bundle.path / "recipe.yaml")
    (name,) = recipe.layers
    model, whole = moexport.load(checkpoint), read_substitutes(tuned.bundle.path)[name]
    with pytest.raises(UsageError, match="not all finite"):
        edited(model, recipe.edits.with_substitutes({name: np.full_like(whole, np.nan)}))
    for edits in (
        recipe.edits,  # the numbers were not read
        recipe.edits.with_substitutes({name: np.zeros((1, 1, 1), np.float32)}),
        recipe.edits.with_substitutes({name: whole.astype(np.float16)}),
    ):
        with pytest.raises(UsageError, match=r"the numbers that replace experts are"):
            edited(model, edits)


def test_a_layer_that_stays_in_floats_is_planned_in_floats() -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    base = export_job(model, ExportOptions(target="ort-cpu", verify=False))
    first, *others = model.layers
    layers = [(first, LayerRecipe(2)), *((name, LayerRecipe(2, "int4")) for name in others)]
    lowerings = {first: "dense", **dict.fromkeys(others, "grouped")}  # dense has no INT4
    planned = plan_traced(
        job_of(base, Point(tuple(layers), "ort-cpu"), lowerings), trace(base.model), None
    )
    (graph,) = planned.graphs
    assert {each.name: each.lowering.name for each in graph.layers} == lowerings
    assert planned.precision.layers[first].precision == "fp32"


def test_a_recipe_is_refused_for_another_model_and_beside_what_it_says(
    tuned: Tuned, checkpoint: Path, tmp_path: Path
) -> None:
    recipe = ("--recipe", tuned.bundle.path / "recipe.yaml", "-o", tmp_path / "x")
    weights = torch.load(checkpoint)
    weights[next(iter(weights))] += 1
    torch.save(weights, tmp_path / "retrained.pt")
    other = run("export", tmp_path / "retrained.pt", *recipe)
    assert other.code == 2
    assert "another model" in other.error
    of_other_shapes = run("export", DATA / "soft_moe_mnist" / "weights.pt", *recipe)
    assert of_other_shapes.code == 1
    assert "check that this is the right checkpoint" in of_other_shapes.hint
    beside = run("export", checkpoint, *recipe, "--k", "4")
    assert beside.code == 2
    assert "--k" in beside.error
    assert not (tmp_path / "x").exists()


def test_the_report_draws_every_point(tuned: Tuned) -> None:
    folder = tuned.bundle.path.parent / "report"
    from moexport.bench.results import read
    from moexport.plugins.tune.report.record import tuning_in

    record = tuning_in(read(folder / "results.json").analyses)
    assert record is not None
    assert len(record.points) == len(tuned.all_trials)
    assert sum(point.chosen for point in record.points) == 1
    assert not (folder / "unfinished.jsonl").exists()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return moexport.load(checkpoint)


def few(digits: Digits, count: int) -> LabelledData:
    return digits.test.head(count)


def refused(model: Model, data: LabelledData, folder: Path, **asked: object) -> Exception:
    with pytest.raises(MoexportError) as caught:
        moexport.tune(model, data, folder / "out", **asked)
    assert not (folder / "out").exists()
    return caught.value


def test_a_second_search_in_the_same_folder_is_refused_at_once(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    with exclusive_folder(report):
        error = refused(model, few(digits, 60), tmp_path, report=report, keep="97%")
    assert str(error).startswith(f"{report}: another moexport process is writing")


def test_a_second_search_for_the_same_bundle_is_refused_at_once(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with exclusive_place(out):
        error = refused(model, few(digits, 60), tmp_path, keep="97%")
    assert str(error).startswith(f"{out}: another moexport process is writing")
    assert [*tmp_path.iterdir()] == []


def test_too_few_inputs_say_how_many_it_takes(model: Model, digits: Digits, tmp_path: Path) -> None:
    error = refused(model, few(digits, 60), tmp_path)
    assert "30 inputs are left to confirm" in str(error)
    assert "give at least" in str(getattr(error, "hint", ""))


def test_labels_of_one_class_say_nothing(model: Model, digits: Digits, tmp_path: Path) -> None:
    labels = np.zeros(len(digits.test), np.int64)
    data = LabelledData(digits.test.inputs, labels, "input", "label")
    assert "the same class" in str(refused(model, data, tmp_path))


def nan_score(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    del labels
    return np.full(len(outputs), np.nan)


def test_a_metric_that_returns_nan_is_named(model: Model, digits: Digits, tmp_path: Path) -> None:
    name = f"{__name__}:nan_score"
    import sys

    sys.modules.setdefault(__name__, sys.modules[__name__])
    assert "returned nan" in str(refused(model, digits.test, tmp_path, metric=name))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"keep": "100%"}, "keep=1"),
        ({"keep": "much"}, "not a share"),
        ({"max_latency": "fast"}, "not a time"),
        ({"max_bytes": "0"}, "not a number of bytes"),
        ({"precision": "int8"}, "tune compares everything with it"),
        ({"target": "tensorrt-rtx"}, "engines"),
        ({"metric": "beauty"}, "no such metric"),
        ({"precision": "fp32,fp16"}, "everything is computed in FP32"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    model: Model, digits: Digits, tmp_path: Path, asked: dict[str, object], said: str
) -> None:
    assert said in str(refused(model, digits.test, tmp_path, **asked))


def noisy_score(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """A score that needs more than a hundred inputs."""
    return np.where(outputs.argmax(axis=1) == labels, 1.0, 0.0)


def test_a_share_that_the_model_as_trained_cannot_be_shown_to_keep_is_told_before_the_search(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    steps = Steps()
    error = refused(
        model,
        few(digits, 100),
        tmp_path,
        keep="99%",
        metric=f"{__name__}:noisy_score",
        precision="fp32",
        progress=steps,
    )
    assert isinstance(error, ContractError)
    assert "even the model as trained, in FP32, keeps only" in error.message
    assert "would suffice" in str(error.hint)
    assert not [told for told in steps.told if told.startswith(("trying", "searching"))]


def test_bounds_that_contradict_each_other_are_all_named_with_the_nearest(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    error = refused(
        model,
        digits.test,
        tmp_path,
        keep="97%",
        max_latency="1us",
        max_bytes="1kB",
        precision="fp32",
        all_experts=True,
        time="1s",
        threads=1,
    )
    assert isinstance(error, ContractError)
    bounds = 'keep=0.97 with max_latency="0.001ms" and max_bytes=1000'
    assert f"{bounds}: no point meets these bounds" in str(error)
    assert "the nearest takes" in str(error)


def test_floats_of_16_bits_are_tried_where_the_target_computes_them() -> None:
    assert TuneRequest().tried("ort-cuda") == ("fp32", "fp16", "bf16", "int8", "int4")
    assert TuneRequest().tried("ort-cpu") == ("fp32", "int8", "int4")
    assert TuneRequest().tried("openvino") == ("fp32", "bf16", "int8", "int4")
    point = Point((("a", LayerRecipe(2)), ("b", LayerRecipe(1))), "ort-cpu").in_precision("fp16")
    assert point.precision == "fp16"
    assert point.quantize == "experts"
    assert {choice.precision for _, choice in point.layers} == {"fp16"}


@pytest.mark.parametrize(("precision", "op"), [("int8", "grouped"), ("int4", "fused")])
def test_weights_of_integers_are_candidates_on_a_gpu(
    precision: Precision, op: str, tmp_path: Path
) -> None:
    """INT4 in layers of whole blocks, with the rest of the network in FP16."""
    torch.save(vit_state(d=64, heads=4, moe_h=128), tmp_path / "vit.pt")
    loaded = moexport.load(tmp_path / "vit.pt", config={**VIT, "num_heads": 4})
    base = export_job(loaded, ExportOptions(target="ort-cuda", verify=False))
    traced = trace(base.model)
    space = space_of(base, traced, "ort-cuda", TuneRequest().tried("ort-cuda"))
    assert space.floats == ("fp32", "fp16", "bf16")
    assert space.integers == dict.fromkeys(("int8", "int4"), (*loaded.layers, BACKBONE))
    layers = tuple((name, LayerRecipe(2, precision)) for name in loaded.layers)
    job = job_of(base, Point(layers, "ort-cuda"), dict.fromkeys(loaded.layers, op))
    planned = plan_traced(job, traced, None)
    assert {each.precision for each in planned.precision.layers.values()} == {precision}
    assert job.options.float_name == "fp16"
    (graph,) = planned.graphs
    assert [each.lowering.name for each in graph.layers] == [op]


def test_a_search_in_floats_of_16_bits_writes_graphs_of_them(model: Model, digits: Digits) -> None:
    base = export_job(model, ExportOptions(target="ort-cuda", verify=False))
    layers = tuple((name, LayerRecipe(2)) for name in model.layers)
    point = Point(layers, "ort-cuda").in_precision("fp16")
    job = job_of(base, point, dict.fromkeys(model.layers, "gather"))
    assert job.options.precision == "fp16"
    planned = plan_traced(job, trace(base.model), None)
    assert {each.precision for each in planned.precision.layers.values()} == {"fp16"}


def test_a_bound_that_nothing_meets_names_the_nearest(
    tuned: Tuned, checkpoint: Path, digits: Digits, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match="the nearest takes") as caught:
        moexport.tune(
            moexport.load(checkpoint),
            digits.test,
            tmp_path / "out",
            keep="97%",
            max_bytes="1kB",
            precision="fp32",
            all_experts=True,
            time="1s",
            threads=1,
        )
    assert caught.value.EXIT_CODE == 3
    assert not (tmp_path / "out").exists()


def test_a_target_that_this_machine_does_not_run_is_refused_before_anything(tmp_path: Path) -> None:
    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        pytest.skip("ONNX Runtime has CUDA here")
    np.savez(tmp_path / "x.npz", **read_case("soft_moe_mnist").io)  # type: ignore[arg-type]
    line = ("tune", DATA / "soft_moe_mnist" / "weights.pt", "--data", tmp_path / "x.npz")
    refused = run(*line, "-o", tmp_path / "out", "--target", "ort-cuda")
    assert refused.code == 2
    assert CUDA_PROVIDER in refused.error
    assert [each.name for each in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.parametrize(("asked", "had"), [(None, 1), (2, 2)])
def test_a_search_has_the_threads_of_the_fastest_untouched_model(
    asked: int | None, had: int, checkpoint: Path, digits: Digits
) -> None:
    loaded, progress = moexport.load(checkpoint), Steps()
    slow = SlowOnManyThreads(loaded.module)
    with with_threads(3):
        request = TuneRequest(threads=asked, progress=progress)
        plan_search(replace(loaded, module=slow), digits.test, request)
    assert {*slow.had[-10:]} == {had}
    told = [each for each in progress.told if each.startswith("1 thread, with which")]
    assert bool(told) == (asked is None)
