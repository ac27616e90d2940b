"""A plugin for pytest: sessions that tests open on the CPU run in CUDA's kernels instead.

`pytest -p moexport.tests.hard.on_cuda FILES`, for tests of the graphs of `ort-cuda`, which the
CPU's kernels of the same ops judge elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from moexport.common.onnx_runtime import ort
from moexport.exporter.session import CPU, CUDA

ON_GPU = (CUDA, {"use_tf32": "0"})


class OnGpu(ort.InferenceSession):  # type: ignore[misc]
    """A session with CUDA's kernels where a test names the CPU's."""

    def __init__(
        self,
        content: Any,
        options: Any = None,
        providers: Sequence[Any] | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        names = [each if isinstance(each, str) else each[0] for each in providers or ()]
        on_cpu = set(names) <= {CPU}
        super().__init__(content, options, [ON_GPU, CPU] if on_cpu else providers, *others, **named)
        started = super().get_providers()
        assert not on_cpu or started[0] == CUDA, "the CUDA provider did not start"
        self._named = [CPU] if on_cpu else started

    def get_providers(self) -> list[str]:
        """The providers that the test named."""
        return self._named


def pytest_configure(config: pytest.Config) -> None:
    ort.preload_dlls()
    ort.InferenceSession = OnGpu
