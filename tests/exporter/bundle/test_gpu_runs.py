"""Runs bound to a device, captured and replayed. On the CPU, where ONNX Runtime ignores the graph's
name and runs: what is bound, copied and counted is the same. Tests marked `gpu` capture for real.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from moexport.errors import EngineError, FeedError, MissingExtraError
from moexport.exporter import session
from moexport.exporter.bundle import gpu_runs, verify
from moexport.exporter.bundle.batches import SessionByBatch
from moexport.exporter.bundle.gpu_runs import GRAPH_ID, PLAIN, CaptureLock, GpuRuns, why_refused
from moexport.exporter.bundle.parity import PARITY_FILE, TOLERANCES, Reference, gpu_bounds
from moexport.exporter.session import CPU, CUDA, Session, SessionOptions
from moexport.exporter.tensorrt import cuda
from moexport.exporter.tensorrt.backends import first_gpu
from moexport.graphs.lowerings import KINDS
from moexport.graphs.targets import TARGETS
from moexport.tests.command import run
from moexport.tests.exporter.tensorrt.cuda_stand_in import ELAPSED_MS, Cuda
from moexport.tests.recorded import DATA, read_case


class Watched(ort.InferenceSession):  # type: ignore[misc]
    """A session on the CPU that notes the name of the graph of every run, and may fail at some."""

    ids: list[str]
    fails: Callable[[str], Exception | None]

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        graph = options.get_run_config_entry(GRAPH_ID)
        self.ids.append(graph)
        error = self.fails(graph)
        if error is not None:
            raise error
        super().run_with_iobinding(binding, options)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> moexport.Bundle:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    folder = tmp_path_factory.mktemp("gpu_runs") / "out"
    return moexport.export(model, folder, k="input", lowering="gather", target="ort-cuda")


class Runs:
    """`GpuRuns` on the CPU, with what it opened and the names of graphs that it ran."""

    def __init__(self, bundle: moexport.Bundle, refused: str | None = None) -> None:
        self.path = bundle.path / "model.onnx"
        self.ids: list[str] = []
        self.opened: list[bool] = []
        self.fails: Callable[[str], Exception | None] = lambda _: None
        self.runs = GpuRuns(self.open, refused, device="cpu")

    def open(self, graphs: bool) -> ort.InferenceSession:
        self.opened.append(graphs)
        session = Watched(str(self.path), providers=["CPUExecutionProvider"])
        session.ids, session.fails = self.ids, self.failure
        return session

    def failure(self, graph: str) -> Exception | None:
        return self.fails(graph)

    def __call__(self, x: Any, k: int, *, as_torch: bool = False) -> Any:
        feeds = {"input": x, "k": np.array([k])}
        return self.runs.run(["output"], feeds, as_torch=as_torch)[0]


def inputs(batch: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, 5, 32), np.float32)


@pytest.fixture
def expected(bundle: moexport.Bundle) -> Callable[[np.ndarray, int], np.ndarray]:
    return Session(bundle.path / "model.onnx")


def test_a_shape_and_k_are_captured_when_they_come_back(
    bundle: moexport.Bundle, expected: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    runs = Runs(bundle)
    asked = [(1, 4), (1, 4), (1, 2), (3, 4), (1, 4), (1, 2), (1, 2), (3, 4)]
    replayed = []
    for seed, (batch, k) in enumerate(asked):
        x = inputs(batch, seed)
        np.testing.assert_array_equal(runs(x, k), expected(x, k))
        replayed.append(runs.runs.replayed)
    assert runs.ids == [PLAIN, "1", PLAIN, PLAIN, "1", "2", "2", "3"]
    assert replayed == [graph != PLAIN for graph in runs.ids]
    assert runs.opened == [True]


def test_what_a_replay_gave_is_not_overwritten_by_the_next(
    bundle: moexport.Bundle, expected: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    runs = Runs(bundle)
    for as_torch in (False, True):
        given = [inputs(2, seed) for seed in range(4)]
        values = [torch.from_numpy(x) if as_torch else x for x in given]
        found = [runs(x, 3, as_torch=as_torch) for x in values]
        for x, y in zip(given, found, strict=True):
            assert isinstance(y, torch.Tensor) is as_torch
            np.testing.assert_array_equal(np.asarray(y), expected(x, 3))


def test_a_session_captures_a_bounded_number_of_graphs(
    bundle: moexport.Bundle,
    expected: Callable[[np.ndarray, int], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_runs, "GRAPHS", 2)
    monkeypatch.setattr(gpu_runs, "REMEMBERED", 3)
    runs = Runs(bundle)
    for batch in (1, 2, 3, 4, 5, 6):
        for seed in range(3):
            x = inputs(batch, seed)
            np.testing.assert_array_equal(runs(x, 2), expected(x, 2))
    assert set(runs.ids) == {PLAIN, "1", "2"}
    assert runs.ids.count(PLAIN) == 2 + 4 * 3
    assert len(runs.runs._run_once) <= 3


def test_a_refused_session_is_opened_and_run_without_graphs(bundle: moexport.Bundle) -> None:
    runs = Runs(bundle, "switched off (cuda_graphs=False)")
    for _ in range(3):
        runs(inputs(1), 2)
    assert runs.ids == [PLAIN] * 3
    assert runs.opened == [False]
    assert not runs.runs.replayed


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "This session cannot use the graph capture feature as requested by the user as the "
            "model has control flow nodes which can't be supported by CUDAExecutionProvider",
            "the graph has control flow, which waits for the CPU",
        ),
        (
            "This session cannot use the graph capture feature as requested by the user  as all "
            "compute graph nodes have not been partitioned to the CUDAExecutionProvider",
            "ONNX Runtime runs nodes of the graph on the CPU",
        ),
        (
            "This session cannot use the CUDA Graph feature as requested by the user  as the "
            "model has control flow nodes which can't be supported by CUDA Graphs.",
            "the graph has control flow, which waits for the CPU",
        ),
    ],
)
def test_what_the_runtime_refuses_is_opened_without_graphs(
    said: str, reason: str, bundle: moexport.Bundle
) -> None:
    runs = Runs(bundle)

    def opened(graphs: bool) -> ort.InferenceSession:
        if graphs:
            raise EngineError(f"CUDAExecutionProvider cannot load model.onnx: {said}")
        return runs.open(graphs)

    refused = GpuRuns(opened, None, device="cpu")
    assert refused.refused == reason
    assert why_refused("out of memory") is None
    with pytest.raises(EngineError, match="out of memory"):
        GpuRuns(failing("out of memory"), None, device="cpu")


def failing(words: str) -> Callable[[bool], ort.InferenceSession]:
    def opened(graphs: bool) -> ort.InferenceSession:
        raise EngineError(f"graphs={graphs}: {words}")

    return opened


def test_a_failed_capture_is_said_once_and_the_session_goes_on_without(
    bundle: moexport.Bundle, expected: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    runs = Runs(bundle)
    fail = ort.capi.onnxruntime_pybind11_state.RuntimeException
    said = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for 1024 bytes"
    runs.fails = lambda graph: None if graph == PLAIN else fail(said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(6):
            x = inputs(2, seed)
            np.testing.assert_array_equal(runs(x, 2), expected(x, 2))
    assert [str(each.message) for each in caught] == [
        "capturing a CUDA graph failed: Failed to allocate memory for 1024 bytes; the session runs "
        "kernel by kernel from now on"
    ]
    assert runs.opened == [True, False]
    assert runs.ids == [PLAIN, "1", *[PLAIN] * 5]
    assert runs.runs.refused is not None


def test_sixteen_threads_share_a_session(
    bundle: moexport.Bundle, expected: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    """Each gets the outputs of its own inputs. Two threads run all, with a graph for each shape."""
    runs, threads = Runs(bundle), set[int]()

    def noted(graph: str) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.0005)

    runs.fails = noted
    wrong: list[int] = []

    def calls(seed: int) -> None:
        for turn in range(6):
            batch, k = 1 + turn % 2, 1 + turn % 2
            x = inputs(batch, 100 * seed + turn)
            if not np.array_equal(runs(x, k), expected(x, k)):
                wrong.append(seed)

    runs(inputs(1), 1)
    workers = [threading.Thread(target=calls, args=(seed,)) for seed in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    runs(inputs(1), 1)
    assert wrong == []
    assert len(threads) == 2
    assert set(runs.ids) == {PLAIN, "1", "2", "3"}
    assert runs.ids.count(PLAIN) == 3


def test_a_capture_waits_for_runs_that_have_begun_and_lets_no_other_begin() -> None:
    turns, order = CaptureLock(), list[str]()
    begun, released = threading.Event(), threading.Event()

    def run() -> None:
        with turns.shared():
            begun.set()
            released.wait(5)
            order.append("run")

    def capture() -> None:
        with turns.exclusive():
            order.append("capture begins")
            time.sleep(0.02)
            order.append("capture ends")

    def later() -> None:
        with turns.shared():
            order.append("later")

    first = threading.Thread(target=run)
    first.start()
    assert begun.wait(5)
    second = threading.Thread(target=capture)
    second.start()
    while not turns._capturing:
        time.sleep(0.001)
    third = threading.Thread(target=later)
    third.start()
    released.set()
    for thread in (first, second, third):
        thread.join(5)
    assert order == ["run", "capture begins", "capture ends", "later"]


@pytest.mark.parametrize(
    ("lowering", "reason"),
    [
        ("dense", None),
        ("gather", None),
        ("grouped", "NonZero depends on values"),
        ("conditional", "control flow (If)"),
    ],
)
def test_a_graph_tells_what_keeps_it_from_being_captured(
    lowering: str, reason: str | None, tmp_path: Path
) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    out = moexport.export(model, tmp_path / "out", k=2, lowering=lowering, target="ort-cuda")
    found = gpu_runs.capture_refused(out.path / "model.onnx")
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")
    told = run("inspect", out.path).out
    assert ("is not replayed as a CUDA graph" in told) == (reason is not None)
    assert (reason or "") in told


def test_the_lowerings_that_are_not_captured_are_those_that_wait_for_the_cpu() -> None:
    able = replace(TARGETS["ort-cuda"], data_sizes=False, branches=False)
    waiting = {
        lowering.name
        for kind in KINDS
        for lowering in kind.lowerings
        if lowering.needs and lowering.needs(TARGETS["ort-cuda"]) and not lowering.needs(able)
    }
    assert waiting == set(gpu_runs.UNCAPTURED)


def test_tensors_give_tensors_on_the_cpu(bundle: moexport.Bundle) -> None:
    found = bundle.session(provider="cpu")
    x = inputs(2)
    y = found.run(torch.from_numpy(x), 2)["output"]
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), found(x, 2))
    np.testing.assert_array_equal(found(torch.from_numpy(x).double(), 2).numpy(), found(x, 2))
    by_name = found.run({"input": torch.from_numpy(x)}, 2)["output"]
    assert isinstance(by_name, torch.Tensor)
    shared = found(ort.OrtValue.ortvalue_from_numpy(x), 2)  # speaks DLPack
    np.testing.assert_array_equal(shared.numpy(), found(x, 2))
    assert (found.recorded, found.no_cuda_graphs) == (None, "it does not run on a GPU")


def test_a_tensor_of_another_device_is_refused(bundle: moexport.Bundle) -> None:
    session = bundle.session(provider="cpu")
    with pytest.raises(FeedError, match="is on meta, but the session is on cpu") as caught:
        session(torch.empty(2, 5, 32, device="meta"), 2)
    assert caught.value.hint == "move it: x.to('cpu')"
    with pytest.raises(FeedError, match="float32"):
        session(torch.ones(2, 5, 32, dtype=torch.int64), 2)


def test_an_input_that_the_cpu_reads_keeps_a_graph_from_being_captured() -> None:
    """A replay would go on with the value of the capture."""
    text = """<ir_version: 10, opset_import: ["" : 20]>
    g (float[N] x, int64[1] k) => (float[M] y) { z, i = TopK(x, k)  y = Identity(z) }"""
    model = onnx.parser.parse_model(text)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert gpu_runs._why_not_replayed(session) == "its input 'x' is read on the CPU"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Sessions for CUDA are opened on the CPU; returns the options of the provider, as asked."""
    asked: list[dict[str, str]] = []

    opens = session._open

    def opened(
        path: Path, options: SessionOptions, *, graphs: bool = False, stream: Any = None
    ) -> ort.InferenceSession:
        if options.provider == CUDA:
            asked.append(session._provider_options(path, CUDA, graphs=graphs, stream=stream))
        return opens(path, replace(options, provider=CPU, profile=None))

    monkeypatch.setattr(session, "check_provider", lambda provider: None)
    monkeypatch.setattr(session, "_open", opened)
    monkeypatch.setattr(gpu_runs, "GpuRuns", partial(GpuRuns, device="cpu"))
    return asked


def test_a_session_for_cuda_replays_and_says_so(
    bundle: moexport.Bundle,
    expected: Callable[[np.ndarray, int], np.ndarray],
    on_cuda: list[dict[str, str]],
) -> None:
    found = bundle.session(provider="cuda")
    assert on_cuda == [{"use_tf32": "0", "enable_cuda_graph": "1"}]
    assert found.no_cuda_graphs is None
    recorded = []
    for seed in range(3):
        x = inputs(2, seed)
        np.testing.assert_array_equal(found(x, 2), expected(x, 2))
        np.testing.assert_array_equal(found(torch.from_numpy(x), 2).numpy(), expected(x, 2))
        recorded.append(found.recorded)
    assert recorded == [True] * 3
    x = inputs(3)
    np.testing.assert_array_equal(found.bound(x, 4)()[0], expected(x, 4))
    np.testing.assert_array_equal(found.bound_values(x, 4)()[0], expected(x, 4))
    assert found.gpu_ms(x, 4) is None  # it was not opened to be timed


def test_graphs_for_several_batches_are_replayed_each_by_itself(
    bundle: moexport.Bundle,
    expected: Callable[[np.ndarray, int], np.ndarray],
    on_cuda: list[dict[str, str]],
) -> None:
    (graph,) = bundle.manifest.graphs
    graphs = [
        replace(graph, file=f"{first}.onnx", batches=[first, last])
        for first, last in ((1, 1), (2, 32))
    ]
    found = SessionByBatch(
        bundle.path,
        SessionOptions(CUDA),
        replace(bundle.manifest, graphs=graphs),
        lambda _: Session(bundle.path / "model.onnx", SessionOptions(CUDA)),
    )
    assert found.recorded is None
    recorded: list[bool | None] = []
    for batch in (1, 1, 3, 1, 3):
        x = torch.from_numpy(inputs(batch))
        np.testing.assert_array_equal(found(x, 2).numpy(), expected(x.numpy(), 2))
        recorded.append(found.recorded)
    assert recorded == [False, True, False, True, True]
    assert found.no_cuda_graphs is None
    assert len(on_cuda) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cuda_graphs": False}, "switched off"),
        ({"profile": "times"}, "a replay has no nodes that a profile could time"),
    ],
)
def test_an_option_keeps_a_session_from_replaying(
    options: dict[str, Any], reason: str, bundle: moexport.Bundle, on_cuda: list[dict[str, str]]
) -> None:
    found = bundle.session(provider="cuda", **options)
    assert on_cuda == [{"use_tf32": "0"}]
    assert reason in str(found.no_cuda_graphs)
    for _ in range(3):
        found(inputs(1), 2)
    assert found.recorded is False


def test_the_gpus_time_is_that_of_a_replay_between_two_events(
    bundle: moexport.Bundle, on_cuda: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = Cuda()
    monkeypatch.setattr(cuda, "runtime", lambda: stand_in)
    found = bundle.session(options=SessionOptions(CUDA, timed=True))
    (asked,) = on_cuda
    assert asked["user_compute_stream"] == "1"
    assert found.gpu_ms(inputs(2), 2) == ELAPSED_MS
    assert found.recorded is True
    plain = bundle.session(options=SessionOptions(CUDA, timed=True, cuda_graphs=False))
    assert plain.gpu_ms(inputs(2), 2) == ELAPSED_MS
    assert [*stand_in.held.values()] == ["stream", "stream"]  # events were given back


NO_CUDA = first_gpu() is None or CUDA not in ort.get_available_providers()


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs an NVIDIA GPU and onnxruntime-gpu: make gpu-check")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_replays_on_the_gpu_equal_plain_runs(precision: Any, tmp_path: Path) -> None:
    """Captured outputs are those of plain runs; tensors on the GPU stay there."""
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(
        model, tmp_path / "out", k="input", target="ort-cuda", lowering="gather",
        precision=precision, verify=False,
    )  # fmt: skip
    plain = bundle.session(options=SessionOptions(CUDA, cuda_graphs=False))
    session = bundle.session(options=SessionOptions(CUDA))
    assert session.no_cuda_graphs is None
    for k in case.ks:
        for x in (case.x, case.x[:1]):
            wanted = plain(x, k)
            for turn in range(4):
                np.testing.assert_allclose(session(x, k), wanted, rtol=1e-6, atol=1e-7)
                assert session.recorded == (turn > 0)
            y = session(torch.from_numpy(x).cuda(), k)
            assert y.is_cuda
            np.testing.assert_allclose(y.cpu().numpy(), wanted, rtol=1e-6, atol=1e-7)


def test_verify_compares_a_bundle_for_cuda_in_the_provider_too(
    bundle: moexport.Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the provider is missing, which fails the check that a machine with a GPU would make."""
    name = "parity of model.onnx on the GPU"
    assert name not in {check.name for check in moexport.verify(bundle)}
    monkeypatch.setattr(verify, "check_provider", lambda provider: None)
    (check,) = [check for check in moexport.verify(bundle) if check.name == name]
    assert not check.passed
    assert f"no {CUDA} on this machine" in check.detail
    assert check.hint is not None and "moexport doctor" in check.hint


def test_the_check_on_a_gpu_has_its_own_bound_and_needs_no_provider_elsewhere(
    bundle: moexport.Bundle, monkeypatch: pytest.MonkeyPatch, on_cuda: list[dict[str, str]]
) -> None:
    def missing(provider: str) -> None:
        raise MissingExtraError("ONNX Runtime is not installed", hint="pip install")

    monkeypatch.setattr(verify, "check_provider", missing)
    assert not verify._runs_on_gpu(bundle.manifest)
    monkeypatch.setattr(verify, "check_provider", lambda provider: None)
    assert not verify._runs_on_gpu(replace(bundle.manifest, target="onnx"))
    (check,) = [check for check in moexport.verify(bundle) if check.name.endswith("on the GPU")]
    assert check.passed
    assert "BF16" not in check.detail  # FP32 may be 1e-3 off on a GPU, like graphs that round
    assert on_cuda


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs an NVIDIA GPU and onnxruntime-gpu: make gpu-check")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_verify_on_the_gpu_refuses_another_expert(precision: Any, tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(
        model, tmp_path / "out", k="input", target="ort-cuda", precision=precision
    )
    name = "parity of model.onnx on the GPU"
    assert [c.passed for c in moexport.verify(bundle) if c.name == name] == [True]
    graph = onnx.load(bundle.path / "model.onnx", load_external_data=False)
    for node in graph.graph.node:
        if node.op_type == "TopK":
            value = next(each for each in node.attribute if each.name == "largest")
            value.i = 0
    onnx.save(graph, bundle.path / "model.onnx")
    record = moexport.Bundle.open(bundle.path).manifest.graphs[0]
    bounds = gpu_bounds(TOLERANCES[precision], precision)
    expected = Reference.load(bundle.path / PARITY_FILE)
    found = verify._parity_check(
        bundle.path, bundle.manifest, record, expected, bounds, provider=CUDA
    )
    assert not found.passed


@pytest.mark.gpu
@pytest.mark.skipif(NO_CUDA, reason="needs an NVIDIA GPU and onnxruntime-gpu: make gpu-check")
def test_threads_share_graphs_on_the_gpu(tmp_path: Path) -> None:
    """Sixteen threads on one session, while another session captures, get their own outputs."""
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", k="input", target="ort-cuda", verify=False)
    plain = bundle.session(options=SessionOptions(CUDA, cuda_graphs=False))
    sessions = [bundle.session(options=SessionOptions(CUDA)) for _ in range(2)]
    wanted = {(k, size): plain(case.x[:size], k) for k in case.ks for size in (1, 2)}
    wrong: list[str] = []

    def calls(seed: int) -> None:
        for turn in range(20):
            k, size = case.ks[(seed + turn) % len(case.ks)], 1 + turn % 2
            y = sessions[seed % 2](case.x[:size], k)
            if np.abs(y - wanted[k, size]).max() > 1e-5 * np.abs(y).max():
                wrong.append(f"thread {seed}, k={k}, batch {size}")

    workers = [threading.Thread(target=calls, args=(seed,)) for seed in range(16)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert [session.no_cuda_graphs for session in sessions] == [None, None]
