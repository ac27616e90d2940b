"""An exported graph in OpenVINO, opened here or in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...exporter.session import OPENVINO, SessionOptions
from .onnxruntime import OnnxLoader


@dataclass(frozen=True)
class OpenVinoLoader(OnnxLoader):
    """Opens a graph file on the CPU, where it computes in the graph's own types."""

    profiles: ClassVar[bool] = False

    @property
    def _options(self) -> SessionOptions:
        return SessionOptions(runtime=OPENVINO, threads=self.graph.threads)
