"""What the observing graph sees is what PyTorch's experts get, for every kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.calibration.methods import HALF
from moexport.data.batches import Feed
from moexport.errors import CalibrationError
from moexport.exporter.job import calibration_job
from moexport.exporter.model import Model
from moexport.exporter.quantization.calibrate import Observed, observe_model
from moexport.exporter.requests import CalibrateRequest
from moexport.graphs.layers.base import algorithm_1
from moexport.graphs.layers.soft_moe import SoftMoE, soft_moe_layers
from moexport.tests.graphs.mumoe_layers import mumoe_layers
from moexport.tests.recorded import SOFT_MOE, read_case


def loaded(name: str) -> Model:
    case = read_case(name)
    return moexport.load(case.weights, config=case.config)


@torch.no_grad()
def expert_rows(model: Model, x: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """Every number that the selected experts get and make, by key, from PyTorch alone."""
    rows: dict[str, list[np.ndarray]] = {}

    def record(layer: SoftMoE, args: tuple[torch.Tensor, ...], _: object) -> None:
        routing = layer.route(args[0])
        source = layer.normalise(args[0]) if layer.spec.slots_from == "normalised" else args[0]
        slots = torch.einsum("bmd,bmnp->bnpd", source, routing.dispatch)
        for sample, chosen in enumerate(routing.selected.tolist()):
            for expert in chosen:
                given = slots[sample, expert]
                rows.setdefault(f"{layer.spec.name}/experts.input", []).append(given.numpy())
                if layer.w2 is None:
                    continue
                bias = 0 if layer.b1 is None else layer.b1[expert]
                hidden = layer.activate(given @ layer.w1[expert] + bias)
                rows.setdefault(f"{layer.spec.name}/experts.hidden", []).append(hidden.numpy())

    handles = [
        layer.register_forward_hook(record) for layer in soft_moe_layers(model.module).values()
    ]
    kept = {name: min(k, layer.spec.experts) for name, layer in model.layers.items()}
    with algorithm_1(model.module, kept):
        model.module(torch.from_numpy(x))
    for handle in handles:
        handle.remove()
    return {key: np.concatenate([part.ravel() for part in parts]) for key, parts in rows.items()}


# The other ViTs differ in how their file holds the same experts.
KINDS = [name for name in SOFT_MOE if name not in ("soft_moe_vit", "soft_moe_vit_stacked")]


@pytest.mark.parametrize("name", KINDS)
def test_exactly_the_rows_of_the_selection_are_observed(name: str) -> None:
    model, x, k = loaded(name), read_case(name).x, 2
    seen = observe_model(
        calibration_job(model, x, CalibrateRequest(k=k, batch=2))
    ).observations.histograms
    expected = expert_rows(model, x, k)
    assert expected.keys() == {key for key in seen if "experts." in key}
    for key, values in expected.items():
        h = seen[key]
        assert h.count == values.size
        assert h.minimum == pytest.approx(values.min(), rel=1e-4, abs=1e-5 * h.peak)
        assert h.maximum == pytest.approx(values.max(), rel=1e-4, abs=1e-5 * h.peak)
        # Rounding moves a value across an edge now and then, so compare the shares below.
        ours = np.cumsum(h.counts) / h.count
        assert HALF / 2 <= h.peak / h.width < HALF
        bins = np.floor(values.astype(np.float64) / h.width).astype(int) + HALF
        theirs = np.cumsum(np.bincount(bins, minlength=2 * HALF)) / values.size
        assert np.abs(ours - theirs).max() <= 0.02


@torch.no_grad()
def test_the_backbone_is_observed_too() -> None:
    model, x = loaded("soft_moe_vit"), read_case("soft_moe_vit").x
    seen = observe_model(calibration_job(model, x, CalibrateRequest(batch=1))).observations
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.module.named_modules():
        if isinstance(module, torch.nn.Linear):

            def record(_: object, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                inputs[name] = args[0]

            module.register_forward_pre_hook(record)
    y = model.module(torch.from_numpy(x))
    linears = {key: h for key, h in seen.histograms.items() if "experts." not in key}
    observed = {key.rsplit("/", 2)[0]: h for key, h in linears.items()}
    assert observed.keys() == inputs.keys()
    for name, value in inputs.items():
        assert observed[name].count == value.numel()
        assert observed[name].maximum == pytest.approx(float(value.max()), rel=1e-4)
        assert observed[name].minimum == pytest.approx(float(value.min()), rel=1e-4)
    assert seen.peaks["head/Gemm"] == pytest.approx(float(y.abs().max()), rel=1e-4)
    assert {"blocks.0/Add", "blocks.2.mlp/experts.products"} <= seen.peaks.keys()


@pytest.mark.parametrize("name", ["mumoe_cp_2level", "mumoe_gpt2_tr"])
def test_factors_of_mumoe_layers_are_observed(name: str) -> None:
    model = loaded(name)
    seen = observe_model(
        calibration_job(model, read_case(name).x, CalibrateRequest(batch=2))
    ).observations
    for layer, module in mumoe_layers(model.module).items():
        for index in range(len(module.spec.tensors)):
            assert f"{layer}/tensor.{index}.input" in seen.histograms
            assert f"{layer}/tensor.{index}.product" in seen.histograms
    assert all(np.isfinite(peak) and peak < 1e30 for peak in seen.peaks.values())


def test_the_table_does_not_depend_on_the_feeds_batches_or_kind(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((65, 5, 32)).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", input=x, label=np.arange(65))
    (tmp_path / "folder").mkdir()
    for index, start in enumerate(range(0, 65, 20)):
        np.save(tmp_path / "folder" / f"{index}.npy", x[start : start + 20].astype(np.float64))

    def cut(size: int) -> Iterator[np.ndarray]:
        return (x[start : start + size] for start in range(0, len(x), size))

    feeds: list[Feed] = [
        *(cut(size) for size in (1, 7, 64)),
        tmp_path / "x.npz",
        tmp_path / "folder",
    ]
    model = loaded("soft_moe_lucidrains")
    tables = [moexport.calibrate(model, feed, k=2).to_json() for feed in feeds]
    assert len(set(tables)) == 1


def test_the_runs_own_batch_changes_no_more_than_rounding() -> None:
    case = read_case("soft_moe_lucidrains")
    model = loaded("soft_moe_lucidrains")
    one, three = (
        moexport.calibrate(model, case.x, k=2, batch=batch, method="minmax") for batch in (1, 3)
    )
    for key, r in one.ranges.items():
        assert three.ranges[key].count == r.count
        assert three.ranges[key].high == pytest.approx(r.high, rel=1e-5, abs=1e-6 * r.peak)


def broken(change: Callable[[SoftMoE], None]) -> Model:
    """A recorded model with the weights of its MoE layer changed."""
    model = loaded("soft_moe_lucidrains")
    layer = list(soft_moe_layers(model.module).values())[-1]
    with torch.no_grad():
        change(layer)
    return model


def _fill(value: float) -> Callable[[SoftMoE], None]:
    def change(layer: SoftMoE) -> None:
        for weight in (*layer.w1, layer.b1):
            weight.fill_(value)

    return change


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.nan, "contains NaN"),
        (np.inf, "contains (NaN|infinite values)"),
        (0.0, "is zero for all inputs"),
    ],
)
def test_a_tensor_without_a_range_is_an_error_that_names_it(value: float, says: str) -> None:
    model = broken(_fill(value))
    (*_, last) = model.layers
    with pytest.raises(CalibrationError, match=rf"{last}/experts\.hidden {says}") as caught:
        observe_model(
            calibration_job(model, read_case("soft_moe_lucidrains").x, CalibrateRequest())
        )
    assert caught.value.hint


def test_a_feed_without_inputs_names_a_tensor_that_was_never_seen() -> None:
    with pytest.raises(CalibrationError, match="no input reached this tensor"):
        observe_model(calibration_job(loaded("soft_moe_lucidrains"), [], CalibrateRequest()))


def test_one_run_serves_every_method() -> None:
    job = calibration_job(loaded("soft_moe_lucidrains"), read_case("soft_moe_lucidrains").x)
    seen: Observed = observe_model(job)
    tables = [seen.table(method) for method in ("minmax", "mse")]
    assert tables[0].ranges.keys() == tables[1].ranges.keys()
    assert tables[0].origin.method == "minmax"
