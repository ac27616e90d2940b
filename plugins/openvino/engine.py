"""OpenVINO as an engine of `bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...bench.engines import GraphEngine
from ...exporter.doctor import Requirement

if TYPE_CHECKING:
    from ...bench.runners.base import GraphFile, Loader
    from ...exporter.tensorrt.backends import Gpu

API = 1


def _loader(graph: GraphFile) -> Loader:
    from ...bench.runners.onnxruntime import RuntimeLoader

    return RuntimeLoader(graph, runtime="openvino")


def _state(gpu: Gpu | None) -> str:
    from .runtime import RUNTIME

    del gpu
    return RUNTIME.state()


ENGINE = GraphEngine(
    name="openvino",
    title="OpenVINO",
    requires=(Requirement("run in OpenVINO", _state),),
    extra="openvino",
    loader=_loader,
    target="openvino",
    multiplies_bf16=True,  # FP16 is multiplied in FP32
)
