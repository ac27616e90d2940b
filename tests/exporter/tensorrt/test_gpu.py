"""What needs an NVIDIA GPU: engines that run. Skipped without one; `make gpu-check` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import EngineError, FeedError, UsageError
from moexport.exporter.parity import GPU_RTOL
from moexport.exporter.session import PROVIDERS, SessionOptions
from moexport.exporter.tensorrt.backends import BACKENDS, TENSORRT, Backend, first_gpu
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.profiles import parse_profile
from moexport.exporter.tensorrt.session import EngineSession
from moexport.tests.recorded import RecordedCase, read_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(first_gpu() is None, reason="needs an NVIDIA GPU: make gpu-check"),
]


@pytest.fixture(params=BACKENDS.values(), ids=list(BACKENDS))
def backend_named(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    if not chosen.installed():
        pytest.skip(f"{chosen.title} is not installed: {chosen.install}")
    gpu = first_gpu()
    if gpu is not None and not chosen.serves(gpu.compute_capability):
        pytest.skip(f"{chosen.title} does not serve {gpu.name}")
    return chosen


@pytest.fixture
def case() -> RecordedCase:
    return read_case("soft_moe_vit")


def opened(backend: Backend, case: RecordedCase, place: Path, **options: Any) -> EngineSession:
    """An engine with a profile for one input and one for more, and k from 1 to 8."""
    bundle = moexport.export(
        moexport.load(case.weights, config=case.config),
        place,
        k="input",
        target=backend.name,  # type: ignore[arg-type]  # both are targets
        lowering="gather",
        engine=EngineOptions(
            profiles=(parse_profile("batch=1,k=1:2:8"), parse_profile("batch=2:4:16,k=1:2:8")),
            compute_capabilities=("current",) if backend.builds_without_gpu else (),
            **options,
        ),
    )
    found = bundle.engine(backend.name)
    assert isinstance(found, EngineSession)
    return found


@pytest.fixture
def session(backend: Backend, case: RecordedCase, tmp_path: Path) -> Iterator[EngineSession]:
    with opened(backend, case, tmp_path / "out") as found:
        yield found


def assert_close(y: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(y - expected).max() <= GPU_RTOL * np.abs(expected).max()


def test_an_engine_computes_every_k_as_the_published_code_does(
    session: EngineSession, case: RecordedCase
) -> None:
    for _ in range(4):  # directly, recorded, replayed
        for k in case.ks:
            assert_close(session(case.x, k), case.y(k))
    for _ in range(4):
        assert_close(session(case.x[:1], case.ks[0]), case.y(case.ks[0])[:1])


def test_torch_tensors_go_in_and_come_out(session: EngineSession, case: RecordedCase) -> None:
    k = case.ks[0]
    y = session(torch.from_numpy(case.x), k)
    assert isinstance(y, torch.Tensor)
    assert_close(y.numpy(), case.y(k))
    if torch.cuda.is_available():
        y = session(torch.from_numpy(case.x).cuda(), k)
        assert y.is_cuda
        assert_close(y.cpu().numpy(), case.y(k))
        part = torch.from_numpy(case.x).cuda()[1:]  # lies where no allocation begins
        assert_close(session(part, k).cpu().numpy(), case.y(k)[1:])


def test_work_that_comes_back_is_recorded_once(session: EngineSession, case: RecordedCase) -> None:
    if session.recorded is None:
        pytest.skip("its runtime records by itself")
    recorded = [session(case.x, 2) is not None and session.recorded for _ in range(3)]
    assert recorded == [False, True, True]
    session(case.x[:1], 2)
    assert session.recorded is False


def test_an_engine_without_weights_takes_the_bundles(
    backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    with opened(backend, case, tmp_path / "whole") as whole:
        size = whole.path.stat().st_size
    with opened(backend, case, tmp_path / "stripped", strip_plan=True) as stripped:
        assert stripped.path.stat().st_size < size
        assert_close(stripped(case.x, case.ks[0]), case.y(case.ks[0]))


def test_kernel_timings_are_kept_for_the_next_build(case: RecordedCase, tmp_path: Path) -> None:
    if not TENSORRT.installed():
        pytest.skip(f"{TENSORRT.title} is not installed: {TENSORRT.install}")
    timings = tmp_path / "kernels.cache"
    opened(TENSORRT, case, tmp_path / "first", timing_cache=timings).close()
    size = timings.stat().st_size
    assert size > 1000
    opened(TENSORRT, case, tmp_path / "second", timing_cache=timings).close()
    assert timings.stat().st_size >= size


def test_what_is_outside_the_profile_is_refused(session: EngineSession, case: RecordedCase) -> None:
    with pytest.raises(FeedError, match="outside the engine's profile"):
        session(np.repeat(case.x, 20, axis=0), 2)
    with pytest.raises(UsageError, match="k = 9: outside"):
        session(case.x, 9)


def test_the_gpu_time_is_told(session: EngineSession, case: RecordedCase) -> None:
    assert 0 < session.gpu_ms(case.x[:1], 2) < 1000


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_onnx_runtime_on_a_gpu(provider: str, case: RecordedCase, tmp_path: Path) -> None:
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", k=2, lowering="gather")
    try:
        session = bundle.session(options=SessionOptions(PROVIDERS[provider]))
    except EngineError as error:
        pytest.skip(error.message)
    assert_close(session(case.x), case.y(2))
