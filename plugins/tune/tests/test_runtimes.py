"""A search over several runtimes tries its points in each, and its bundle is of the fastest."""

from __future__ import annotations

from pathlib import Path

import moexport
import numpy as np
import pytest
from moexport.bench.results import read
from moexport.errors import UsageError
from moexport.plugins.demo.digits import load_digits
from moexport.plugins.openvino.tests.test_openvino import computes
from moexport.plugins.tune.findings import text
from moexport.plugins.tune.recipe import LayerRecipe
from moexport.plugins.tune.report.record import tuning_in
from moexport.plugins.tune.request import TuneRequest
from moexport.plugins.tune.tests.small_search import small_search
from moexport.plugins.tune.times import FormTime, LayerTimes
from moexport.plugins.tune.tune import Tuned

pytest.importorskip("openvino", reason="OpenVINO is not installed")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder = tmp_path_factory.mktemp("runtimes")
    return small_search(folder, target="ort-cpu,openvino", precision="fp32,int8")


@pytest.mark.slow
def test_every_runtime_is_tried_in_every_precision(tuned: Tuned) -> None:
    tried = {(trial.point.target, trial.point.precision) for trial in tuned.all_trials}
    assert tried == {(t, p) for t in ("ort-cpu", "openvino") for p in ("fp32", "int8")}
    assert tuned.base.point.target == "ort-cpu"


@pytest.mark.slow
def test_the_bundle_runs_where_the_fastest_point_did(tuned: Tuned) -> None:
    target = tuned.chosen.trial.point.target
    fastest = min(
        (one for one in tuned.sequence if one.quality.low >= 0.9), key=lambda one: one.trial.ms
    )
    assert target == tuned.bundle.manifest.target == fastest.trial.point.target
    assert all(check.passed for check in moexport.verify(tuned.bundle.path))
    x = load_digits(test_share=0.5).test.batch(0, 4)
    y = tuned.bundle.session()(x)
    assert y.shape == (4, 10)
    assert np.isfinite(y).all()


@pytest.mark.slow
def test_the_report_says_why_that_runtime(tuned: Tuned) -> None:
    report = tuned.bundle.path.with_name("report")
    search = tuning_in(read(report / "results.json").analyses)
    assert search is not None
    assert search.fastest.keys() == {"onnxruntime", "openvino"}
    (chosen,) = (point for point in search.points if point.chosen)
    assert search.fastest[chosen.runtime].ms <= chosen.ms
    assert search.fastest[chosen.runtime].confirmed is not None
    why = search.why_runtime
    assert "ms in ONNX Runtime" in why
    assert "ms in OpenVINO" in why
    assert why in text(tuned)
    page = (report / "report.html").read_text(encoding="utf-8")
    assert why in page
    # It is listed even if another point beats it on the search's half.
    assert f"{chosen.text} (chosen)" in page


@pytest.mark.slow
def test_floats_in_which_there_was_no_time_for_a_layer_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not computes("bf16"):
        pytest.skip("this CPU has no BF16")
    known = LayerTimes.form_time

    def in_fp32(times: LayerTimes, layer: str, choice: LayerRecipe) -> FormTime | None:
        return known(times, layer, choice) if choice.precision == "fp32" else None

    monkeypatch.setattr(LayerTimes, "form_time", in_fp32)
    found = small_search(tmp_path, target="openvino", precision="fp32,bf16")
    assert {trial.point.precision for trial in found.all_trials} == {"fp32"}
    assert found.chosen.quality.low >= 0.9


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("ort-cpu,openvinos", "--target openvinos: there is no such target"),
        (",", "--target: the list is empty"),
        ("ort-cpu,tensorrt", "--target tensorrt: tune measures graphs"),
    ],
)
def test_a_list_of_targets_that_cannot_be_meant_is_refused(targets: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TuneRequest(target=targets).check()


def test_a_precision_is_refused_where_no_runtime_of_the_list_computes_it() -> None:
    options = TuneRequest(target="ort-cpu,openvino", precision="fp32,bf16")
    assert options.tried("ort-cpu") == ("fp32",)
    assert options.tried("openvino") == ("fp32", "bf16")
    with pytest.raises(UsageError, match="--precision bf16 for --target ort-cpu"):
        TuneRequest(precision="fp32,bf16").check()
