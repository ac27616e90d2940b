"""Engines of TensorRT take part in a benchmark: those of a bundle, and those compiled for it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import moexport
import numpy as np
import pytest
from moexport.bench.doctor import diagnose
from moexport.bench.engines import KINDS, requirements
from moexport.bench.plan import Candidate, select_engines
from moexport.bench.request import BenchRequest
from moexport.bench.runners.base import in_batches
from moexport.bench.runners.candidates import from_bundle
from moexport.bench.runners.exported import exported
from moexport.bench.runners.graphs import SessionLoader
from moexport.bench.runners.models import loaders
from moexport.bench.runners.tensorrt import EngineLoader, EngineRunner
from moexport.errors import BundleError, EngineError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.inputs import random_arrays
from moexport.exporter.model import Model
from moexport.exporter.tensorrt.backends import first_gpu
from moexport.exporter.tensorrt.profiles import Profile
from moexport.exporter.tensorrt.records import EngineRecord, engines_of
from moexport.exporter.tensorrt.session import EngineSession
from moexport.tests.exporter.tensorrt.engines import needs_rtx
from moexport.tests.recorded import read_case

BACKEND = "tensorrt-rtx"
ASKED = BenchRequest(k=(2,), lowering="gather", batch=(1, 4), engine=BACKEND, target="ort-cpu")


@pytest.fixture(scope="module")
def model() -> Model:
    case = read_case("soft_moe_mnist_normalized")
    return moexport.load(case.weights, config=case.config)


def engine_of(candidate: Candidate) -> EngineLoader:
    """The only engine of a candidate, to be compiled for a card by name: there may be none here."""
    (source,) = candidate.graphs
    assert isinstance(source.loader, EngineLoader)
    assert source.loader.graph.options is not None
    options = replace(source.loader.graph.options, compute_capabilities=("8.9",))
    return replace(source.loader, graph=replace(source.loader.graph, options=options))


def built(loader: EngineLoader) -> EngineRecord:
    assert loader.graph.options is not None
    loader.build(loader.graph.options)
    (record,) = engines_of(Manifest.read(loader.graph.path.parent))
    return record


@needs_rtx
def test_a_sweep_compiles_an_engine_for_its_batches_when_it_is_opened(model: Model) -> None:
    with exported(model, ASKED, inputs=random_arrays(model, 1)[model.input.name]) as candidate:
        (source,) = candidate.graphs
        assert (source.engine, source.provider, source.k) == (BACKEND, BACKEND, 2)
        assert pickle.loads(pickle.dumps(source.loader)) == source.loader
        loader = engine_of(candidate)
        record = built(loader)
        assert record.flavour == BACKEND
        ranges = [(each.min[0], each.opt[0], each.max[0]) for each in record.ranges]
        assert ranges == [(1, 1, 1), (4, 4, 4)]
        assert set(record.precision) == {"fp32"}
        if first_gpu() is None:
            with pytest.raises(EngineError, match="there is no NVIDIA GPU here"):
                loader()


@needs_rtx
def test_the_second_sweep_takes_its_engine_from_the_cache(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEXPORT_ENGINE_CACHE", str(tmp_path))
    records = []
    for _ in range(2):
        with exported(model, ASKED) as candidate:
            records.append(built(engine_of(candidate)))
    assert len(list(tmp_path.glob("*.plan"))) == 1
    assert records[0] == records[1]  # the seconds that it took among the rest


@needs_rtx
def test_an_engine_of_another_precision_than_was_asked_for_is_refused(model: Model) -> None:
    with exported(model, replace(ASKED, precision="fp16")) as candidate:
        loader = engine_of(candidate)
        path = loader.graph.path.parent / "manifest.json"
        manifest = path.read_text()
        assert '"precision": "fp16"' in manifest
        path.write_text(manifest.replace('"precision": "fp16"', '"precision": "int8"'))
        with pytest.raises(EngineError, match="requested in int8, but built in fp16"):
            built(loader)
        path.write_text(manifest)
        assert "fp16" in built(loader).precision


def test_onnx_runtimes_tensorrt_and_tensorrt_itself_do_not_meet(model: Model) -> None:
    asked = replace(ASKED, engine=("onnxruntime-tensorrt", "tensorrt"), precision=("fp32", "fp16"))
    with exported(model, asked) as candidate:
        folders: dict[tuple[str, str], Path] = {}
        for source in candidate.graphs:
            assert source.provider == "tensorrt"
            if source.engine == "tensorrt":
                assert isinstance(source.loader, EngineLoader)
                assert source.loader.backend == "tensorrt"
                assert Bundle.open(source.loader.graph.path.parent).manifest.target == "tensorrt"
                folder = source.loader.graph.path.parent
            else:
                assert isinstance(source.loader, SessionLoader)
                assert source.loader.options.provider == "TensorrtExecutionProvider"
                assert source.loader.graph.path.is_file()
                folder = source.loader.graph.path.parent
            folders[source.engine, source.precision] = folder
        assert len(folders) == len(set(folders.values())) == 4
        labels = [each.label for each in loaders(candidate)]
        assert len(labels) == len(set(labels))


def test_a_bundle_takes_part_with_the_engine_that_it_holds(exported: Path) -> None:
    bundle = moexport.Bundle.open(exported)
    case = read_case("soft_moe_vit")
    candidate = from_bundle(bundle, ASKED, model=moexport.load(case.weights, config=case.config))
    assert [source.engine for source in candidate.graphs] == [BACKEND] * 2
    source = candidate.graphs[0].loader
    assert isinstance(source, EngineLoader)
    with pytest.raises(EngineError, match=r"has no tensorrt-rtx engine of model\.onnx"):
        source()


def test_a_bundle_that_has_changed_is_not_measured(exported: Path, tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    damaged = Path(shutil.copytree(exported, tmp_path / "damaged"))
    content = bytearray((damaged / "weights.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "weights.bin").write_bytes(content)
    asked = replace(ASKED, engine="onnxruntime")
    with pytest.raises(BundleError, match=r"weights\.bin: the content has changed"):
        from_bundle(moexport.Bundle.open(damaged), asked, model=model)
    assert from_bundle(moexport.Bundle.open(damaged, check=False), asked, model=model).graphs


def test_batches_that_an_engine_does_not_take_are_filled_up() -> None:
    x = np.arange(11, dtype=np.float32).reshape(11, 1)
    seen = []

    def run(part: np.ndarray) -> np.ndarray:
        seen.append(len(part))
        return 2 * part

    y = in_batches(run, x, limit=4, accepts=lambda size: size in (1, 4))
    np.testing.assert_array_equal(y, 2 * x)
    assert seen == [4, 4, 4]
    np.testing.assert_array_equal(
        in_batches(run, x[:1], limit=4, accepts=lambda size: size == 1), 0
    )
    assert seen[3:] == [1]


class BatchesOfFour:
    """An engine without a GPU: it doubles inputs in batches of four, and chooses two experts."""

    output_names = ("output", "layer/selected")
    profiles = (Profile("input", (4, 1), (4, 1), (4, 1)),)

    def run(self, x: np.ndarray, k: int | None, outputs: Any) -> dict[str, np.ndarray]:
        assert len(x) == 4
        found = {"output": 2 * x, "layer/selected": np.stack([x[:, 0] + 1, x[:, 0]], 1)}
        return {name: found[name] for name in outputs}

    def gpu_ms(self, x: np.ndarray, k: int | None) -> float:
        return float(len(x))


def test_what_fills_a_batch_up_is_in_no_output_and_no_choice() -> None:
    session = cast(EngineSession, BatchesOfFour())
    runner = EngineRunner(session, None, {"layer": "layer/selected"}, {"layer": 12})
    x = np.arange(10, dtype=np.float32).reshape(10, 1)
    np.testing.assert_array_equal(runner.infer(x), 2 * x)
    chosen = runner.selected(x)
    assert chosen is not None
    np.testing.assert_array_equal(chosen["layer"], np.hstack([x, x + 1]))
    assert runner.device_ms(x) == 12
    assert EngineRunner(session, None).selected(x) is None


def test_absent_engines_have_the_reason_that_doctor_gives() -> None:
    told: Mapping[str, str] = {
        each.name: each.detail for each in diagnose(requirements()).abilities if not each.available
    }
    absent = {each.engine: each.reason for each in select_engines(KINDS).absent}
    titles = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
    abilities = {name: [f"build {t} engines", f"run {t} engines"] for name, t in titles.items()}
    abilities["onnxruntime-cuda"] = ["run on CUDA"]
    abilities["onnxruntime-tensorrt"] = ["run on ONNX Runtime's TensorRT"]
    for engine, names in abilities.items():
        expected = next((told[name] for name in names if name in told), None)
        assert absent.get(engine) == expected
