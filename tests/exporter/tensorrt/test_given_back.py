"""The GPU's memory is given back: when a session closes, fails, or is held by nobody any more."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from moexport.errors import EngineError
from moexport.exporter.tensorrt import cuda, session
from moexport.exporter.tensorrt.profiles import Profile
from moexport.exporter.tensorrt.session import EngineSession, LoadedEngine
from moexport.tests.exporter.tensorrt.cuda_stand_in import GIVES, Cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(cuda, "runtime", lambda: stand_in)
    return stand_in


class Loaded:
    """What stands for an engine of TensorRT's: it takes 2 × 3 numbers and gives them back."""

    records_itself, takes_k, input_name, output_names = False, False, "input", ["output"]
    bound_addresses: ClassVar[dict[str, int]] = {}
    profiles: ClassVar = [Profile(input="input", min=(1, 3), opt=(2, 3), max=(2, 3), k=None)]
    closed = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).closed = 0

    def bind_weights(self, *_: Any, **__: Any) -> None: ...

    def bind(self, name: str, address: int) -> None: ...

    def enqueue(self, stream: int) -> None: ...

    def use(self, index: int, shape: Any, k: Any, stream: int) -> dict[str, Any]:
        return {"output": shape}

    def capturable(self, stream: int) -> bool:
        return True

    def dtype(self, name: str) -> str:
        return "float32"

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def opened(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> EngineSession:
    plan = SimpleNamespace(backend=SimpleNamespace(name="tensorrt"), record=None)
    monkeypatch.setattr(session, "find_plan", lambda *_, **__: plan)
    monkeypatch.setattr(session, "LoadedEngine", Loaded)
    found = EngineSession(Path("engine.plan"))
    for _ in range(3):  # directly, recorded, replayed
        found(np.zeros((2, 3), np.float32))
    return found


def test_what_a_session_took_is_given_back_when_it_closes(opened: EngineSession, gpu: Cuda) -> None:
    assert sorted(gpu.held.values()) == ["graph", "memory", "memory", "recording", "stream"]
    opened.close()
    assert gpu.held == {}
    opened.close()
    assert Loaded.closed == 1


def test_a_session_that_nobody_closed_gives_back_what_it_took(
    opened: EngineSession, gpu: Cuda
) -> None:
    replaced = EngineSession(Path("engine.plan"))
    replaced(np.zeros((2, 3), np.float32))
    before = len(gpu.held)
    del replaced
    gc.collect()
    assert Loaded.closed == 1
    assert len(gpu.held) == before - 3
    opened.close()
    assert gpu.held == {}


@pytest.mark.parametrize("fails", ["cudaGraphExecDestroy", "cudaFree", "cudaStreamDestroy"])
def test_what_fails_to_be_given_back_keeps_nothing_else(
    fails: str, opened: EngineSession, gpu: Cuda
) -> None:
    gpu.fails.add(fails)
    with pytest.raises(EngineError, match=fails):
        opened.close()
    assert Loaded.closed == 1
    assert {*gpu.held.values()} == {GIVES[fails]}


@pytest.mark.parametrize("fails", ["cudaStreamCreateWithFlags", "cudaMalloc"])
def test_a_session_that_cannot_begin_keeps_nothing(
    fails: str, opened: EngineSession, gpu: Cuda
) -> None:
    opened.close()
    gpu.fails.add(fails)
    with pytest.raises(EngineError, match=fails):
        EngineSession(Path("engine.plan"))
    assert gpu.held == {}
    assert Loaded.closed == 1


def test_a_recording_that_cannot_be_made_ready_is_forgotten(gpu: Cuda) -> None:
    stream = cuda.Stream()
    gpu.fails.add("cudaGraphInstantiate")
    with pytest.raises(EngineError, match="cudaGraphInstantiate"):
        cuda.capture(stream, lambda: None)
    assert [*gpu.held.values()] == ["stream"]


def test_a_recording_whose_work_fails_is_forgotten(gpu: Cuda) -> None:
    stream = cuda.Stream()

    def send() -> None:
        raise EngineError("the run failed on the GPU")

    with pytest.raises(EngineError, match="the run failed on the GPU"):
        cuda.capture(stream, send)
    assert [*gpu.held.values()] == ["stream"]


def test_an_engine_whose_kernels_cannot_be_kept_is_closed_all_the_same() -> None:
    def kernels() -> None:
        raise RuntimeError("serialization failed")

    loaded = LoadedEngine.__new__(LoadedEngine)
    loaded._save_kernels, loaded._placed = kernels, [object()]  # type: ignore[list-item]
    loaded._context = loaded._runtime_cache = loaded._engine = loaded._runtime = object()
    with suppress(RuntimeError):
        loaded.close()
    assert not loaded._placed
    assert (loaded._context, loaded._runtime_cache, loaded._engine, loaded._runtime) == (None,) * 4
