"""Engines of TensorRT take part in a benchmark: those of a bundle, and those compiled for it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import moexport
import pytest
from moexport.bench.engine_runner import BundleEngine, GraphEngine
from moexport.bench.subjects import Asked, exported, from_bundle
from moexport.errors import EngineError
from moexport.exporter.engines.device import first_gpu
from moexport.exporter.engines.planfile import read_header
from moexport.tests.recorded import read_case
from moexport.tests.targets.engines import needs_rtx

FLAVOUR = "tensorrt-rtx"
ASKED = Asked(ks=(2,), lowerings=("gather",), batches=(1, 4), engines=(FLAVOUR,), providers=())


@needs_rtx
def test_a_sweep_compiles_an_engine_for_its_batches_when_it_is_opened() -> None:
    case = read_case("soft_moe_mnist_normalized")
    model = moexport.load(case.weights, config=case.config)
    with exported(model, ASKED) as subject:
        (source,) = subject.graphs
        assert (source.engine, source.provider, source.k) == (FLAVOUR, FLAVOUR, 2)
        assert isinstance(source.open, GraphEngine)
        assert pickle.loads(pickle.dumps(source.open)) == source.open
        assert (source.open.profile.min[0], source.open.profile.max[0]) == (1, 4)
        elsewhere = replace(source.open, cards=("8.9",))
        header = read_header(elsewhere.built())
        assert header is not None
        assert header.flavour.name == FLAVOUR
        if first_gpu() is None:
            with pytest.raises(EngineError, match="there is no NVIDIA GPU here"):
                elsewhere()


def test_a_bundle_takes_part_with_the_engine_that_it_holds(exported: Path) -> None:
    bundle = moexport.Bundle.open(exported)
    case = read_case("soft_moe_vit")
    subject = from_bundle(bundle, ASKED, model=moexport.load(case.weights, config=case.config))
    assert [source.engine for source in subject.graphs] == [FLAVOUR] * 2
    source = subject.graphs[0].open
    assert isinstance(source, BundleEngine)
    with pytest.raises(EngineError, match=r"holds no tensorrt-rtx engine of model\.onnx"):
        source()
