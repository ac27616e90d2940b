"""What needs an NVIDIA GPU: engines that run. Skipped without one; `make gpu-check` runs them.

Each check's docstring says what it shows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import EngineError, FeedError, MissingExtraError, UsageError
from moexport.exporter.bundle.parity import GPU_RTOL, PARITY_FILE, TOLERANCES, Reference, gpu_bounds
from moexport.exporter.session import PROVIDERS, SessionOptions
from moexport.exporter.tensorrt import cache, cuda
from moexport.exporter.tensorrt.backends import BACKENDS, TENSORRT, TENSORRT_RTX, Backend, first_gpu
from moexport.exporter.tensorrt.engines import precision_notes
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.profiles import parse_profile
from moexport.exporter.tensorrt.records import engines_of
from moexport.exporter.tensorrt.session import EngineSession
from moexport.exporter.tensorrt.verify import engine_parity
from moexport.tests.recorded import RecordedCase, read_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(first_gpu() is None, reason="needs an NVIDIA GPU: make gpu-check"),
]


@pytest.fixture(params=BACKENDS.values(), ids=list(BACKENDS), name="backend")
def installed_backend(request: pytest.FixtureRequest) -> Backend:
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


def built(
    backend: Backend,
    case: RecordedCase,
    place: Path,
    *,
    lowering: str = "gather",
    precision: Any = "fp32",
    shown: bool = False,
    **options: Any,
) -> moexport.Bundle:
    """A bundle whose engine has a profile for one input and one for more, and k from 1 to 8.

    An engine that another test has built is taken from the cache.
    """
    return moexport.export(
        moexport.load(case.weights, config=case.config),
        place,
        k="input",
        target=backend.name,
        lowering=lowering,
        precision=precision,
        data=case.x,
        expose_routing=shown,
        engine=EngineOptions(
            profiles=(parse_profile("batch=1,k=1:2:8"), parse_profile("batch=2:4:16,k=1:2:8")),
            compute_capabilities=("current",) if backend.builds_without_gpu else (),
            **{"cache": cache.default_cache()} | options,
        ),
    )


def opened(backend: Backend, case: RecordedCase, place: Path, **options: Any) -> EngineSession:
    """The engine of `built`, on the GPU."""
    found = built(backend, case, place, **options).engine(backend.name)
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
    """Outputs at every k within 1e-3 of the published code: run directly, recorded and replayed."""
    for _ in range(4):  # directly, recorded, replayed
        for k in case.ks:
            assert_close(session(case.x, k), case.y(k))
    for _ in range(4):
        assert_close(session(case.x[:1], case.ks[0]), case.y(case.ks[0])[:1])


def test_torch_tensors_are_inputs_and_outputs(session: EngineSession, case: RecordedCase) -> None:
    """Tensors on the CPU and on the GPU are inputs; the outputs are on the same device."""
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


def test_repeated_work_is_recorded_once(session: EngineSession, case: RecordedCase) -> None:
    """A CUDA graph is recorded at the second run and replayed from then on."""
    if session.recorded is None:
        pytest.skip("its runtime records by itself")
    recorded = [session(case.x, 2) is not None and session.recorded for _ in range(3)]
    assert recorded == [False, True, True]
    session(case.x[:1], 2)
    assert session.recorded is False


def test_an_engine_without_weights_takes_the_bundles(
    backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """A plan without weights (`--strip-plan`, `REFIT_IDENTICAL`) gives the same outputs."""
    with opened(backend, case, tmp_path / "whole") as whole:
        size = whole.path.stat().st_size
    with opened(backend, case, tmp_path / "stripped", strip_plan=True) as stripped:
        assert stripped.path.stat().st_size < size
        assert_close(stripped(case.x, case.ks[0]), case.y(case.ks[0]))


def test_kernel_timings_are_reused_by_the_next_build(case: RecordedCase, tmp_path: Path) -> None:
    """A build uses the timing cache of the one before."""
    if not TENSORRT.installed():
        pytest.skip(f"{TENSORRT.title} is not installed: {TENSORRT.install}")
    timings = tmp_path / "kernels.cache"
    asked: dict[str, Any] = {"timing_cache": timings, "cache": None}
    opened(TENSORRT, case, tmp_path / "first", **asked).close()
    size = timings.stat().st_size
    assert size > 1000
    opened(TENSORRT, case, tmp_path / "second", **asked).close()
    assert timings.stat().st_size >= size


def test_what_is_outside_the_profile_is_refused(session: EngineSession, case: RecordedCase) -> None:
    """Shapes and k outside the profiles are refused before the GPU sees them."""
    with pytest.raises(FeedError, match="outside the engine's profile"):
        session(np.repeat(case.x, 20, axis=0), 2)
    with pytest.raises(UsageError, match="k = 9: outside"):
        session(case.x, 9)


def test_the_gpu_time_is_reported(session: EngineSession, case: RecordedCase) -> None:
    """The GPU's own time of a run is reported."""
    assert 0 < session.gpu_ms(case.x[:1], 2) < 1000


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_onnx_runtime_on_a_gpu(provider: str, case: RecordedCase, tmp_path: Path) -> None:
    """ONNX Runtime's CUDA and TensorRT providers compute the same, in FP32 without TF32."""
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", k=2, lowering="gather")
    try:
        session = bundle.session(options=SessionOptions(PROVIDERS[provider]))
    except (EngineError, MissingExtraError) as error:  # TensorRT 11 beside a provider for 10
        pytest.skip(error.message)
    assert_close(session(case.x), case.y(2))


def test_the_driver_and_the_binding_go_together() -> None:
    """cuda-bindings is of a CUDA version that this driver supports."""
    assert cuda.driver_problem() is None
    cuda.check_device()


def test_tf32_is_off_unless_asked_for(backend: Backend, case: RecordedCase, tmp_path: Path) -> None:
    """FP32 stays within 1e-3; with `--tf32`, within the bounds of FP16."""
    k = case.ks[0]
    with opened(backend, case, tmp_path / "fp32") as session:
        assert_close(session(case.x, k), case.y(k))
    with opened(backend, case, tmp_path / "tf32", tf32=True) as session:
        off = np.abs(session(case.x, k) - case.y(k)).max()
    bounds = gpu_bounds(TOLERANCES["fp32"], "fp32", tf32=True)
    assert off <= bounds.rtol * np.abs(case.y(k)).max()


def test_kernels_are_cached_for_the_next_start(
    case: RecordedCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX writes its compiled kernels at the end, and reads them at the next start."""
    if not TENSORRT_RTX.installed():
        pytest.skip(f"{TENSORRT_RTX.title} is not installed: {TENSORRT_RTX.install}")
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "engines"))
    bundle = built(TENSORRT_RTX, case, tmp_path / "out")
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        with bundle.engine(TENSORRT_RTX.name, eager=True) as session:
            session(case.x, case.ks[0])
        seconds.append(time.perf_counter() - begun)
        assert list((tmp_path / "engines").glob("*.kernels"))
    assert seconds[1] < seconds[0]


def test_control_flow_is_not_recorded(backend: Backend, case: RecordedCase, tmp_path: Path) -> None:
    """`conditional` runs without a CUDA graph if the context cannot be captured."""
    with opened(backend, case, tmp_path / "out", lowering="conditional") as session:
        for _ in range(3):
            assert_close(session(case.x, case.ks[0]), case.y(case.ks[0]))


def test_weights_stream_from_the_machines_memory(
    backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """With `--weight-streaming` and a small budget on the GPU, the outputs stay the same."""
    with opened(backend, case, tmp_path / "out", weight_streaming="64KiB") as session:
        assert_close(session(case.x, case.ks[0]), case.y(case.ks[0]))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_the_inspector_names_the_experts(
    precision: str, backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """Where the engine's layers name the experts of a MoE layer, they have its precision.

    Where not, a note of the bundle says so: the strongly typed network proves it. Of INT8 a kernel
    may read floats, which were dequantised before.
    """
    bundle = built(backend, case, tmp_path / "out", precision=precision)
    (record,) = engines_of(bundle.manifest)
    layers = [layer.name for layer in bundle.manifest.layers]
    assert sorted(record.kernels) == sorted(layers)
    assert {*precision_notes(record.file, record.kernels)} <= {*bundle.manifest.notes}
    if precision != "int8":
        assert all(not types or precision in types for types in record.kernels.values())


def test_onnx_runtime_keeps_one_engine_for_every_k(
    case: RecordedCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's TensorRT provider builds one engine for all k, and reuses it later."""
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "engines"))
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", k="input", lowering="gather")
    counts = []
    for _ in range(2):
        try:
            session = bundle.session(options=SessionOptions(PROVIDERS["tensorrt"]))
        except (EngineError, UsageError, MissingExtraError) as error:
            pytest.skip(error.message)
        for k in case.ks:
            assert_close(session(case.x, k), case.y(k))
        counts.append(len(list((tmp_path / "engines").rglob("*.engine"))))
    assert counts[0] == counts[1] > 0


def test_an_engine_runs_without_pytorch(
    backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """An engine runs with numpy, TensorRT and cuda-bindings alone."""
    bundle, k = built(backend, case, tmp_path / "out"), str(case.ks[0])
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'onnxruntime', 'polygraphy'): sys.modules[name] = None\n"
        "from moexport.__main__ import main\nmain()\n"
    )
    np.savez(tmp_path / "x.npz", input=case.x)
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--engine", backend.name)
    subprocess.run([sys.executable, "-c", code, "run", bundle.path, *files, "--k", k], check=True)
    assert_close(np.load(tmp_path / "y.npz")["output"], case.y(case.ks[0]))


@pytest.mark.parametrize("lowering", ["dense", "conditional", "block-grouped"])
def test_every_lowering_computes_the_same(
    lowering: str, backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """`dense`, `conditional` and `block-grouped` agree with `gather` at every k and batch."""
    with opened(backend, case, tmp_path / "out", lowering=lowering) as session:
        for k in case.ks:
            assert_close(session(case.x, k), case.y(k))
            assert_close(session(case.x[:1], k), case.y(k)[:1])


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("lowering", ["gather", "block-grouped"])
def test_bound_experts_give_the_same_from_either_memory(
    lowering: str, precision: str, backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """`--bind-weights` does not change the outputs, with the experts on the GPU or on the host."""
    asked: dict[str, Any] = {"lowering": lowering, "precision": precision}
    with opened(backend, case, tmp_path / "whole", **asked) as whole:
        expected = whole(case.x, case.ks[0])
    bundle = built(backend, case, tmp_path / "bound", bind_weights=True, **asked)
    for host in (False, True):
        with bundle.engine(backend.name, host_weights=host) as session:
            found = session(case.x, case.ks[0])
        bounds = TOLERANCES["fp16"]
        assert np.abs(found - expected).max() <= bounds.rtol * np.abs(expected).max()


def test_engines_of_a_bundle_share_their_experts(
    backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """Two engines of one bundle bind the same addresses, so the GPU holds the experts once."""
    options: dict[str, Any] = {"lowering": "gather,block-grouped", "bind_weights": True}
    bundle = built(backend, case, tmp_path / "out", **options)
    names = [graph.file for graph in bundle.manifest.graphs]
    with bundle.engine(backend.name, names[0]) as one, bundle.engine(backend.name, names[1]) as two:
        assert one.bound_addresses == two.bound_addresses != {}


def test_experts_are_swapped_without_a_build(
    backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """An engine with the experts of another bundle gives that bundle's outputs."""
    bundle = built(backend, case, tmp_path / "out", bind_weights=True)
    model = moexport.load(case.weights, config=case.config)
    layer = model.layers[next(iter(model.layers))]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("w1"):
                parameter.mul_(1.5)
    options: dict[str, Any] = {"k": "input", "target": backend.name, "lowering": "gather"}
    other = moexport.export(model, tmp_path / "other", engine=False, **options)
    expected = other.session()(case.x, case.ks[0])
    with bundle.engine(backend.name, experts=other.path) as session:
        assert_close(session(case.x, case.ks[0]), expected)


@pytest.mark.parametrize("of", ["graph", "engine"])
def test_what_layers_choose_is_compared_on_the_device(
    of: str, backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """With `--expose-routing`, every layer selects the same experts as PyTorch, except for ties."""
    asked: dict[str, Any] = {"shown": True} if of == "graph" else {"expose_routing": True}
    bundle = built(backend, case, tmp_path / "out", **asked)
    (record,) = engines_of(bundle.manifest)
    expected = Reference.load(bundle.path / PARITY_FILE)
    with bundle.engine(backend.name) as session:
        parity = engine_parity(session, bundle.manifest, record, expected)
    assert parity.choices is not None and parity.agreeing == parity.choices


def test_verify_runs_an_engine(backend: Backend, case: RecordedCase, tmp_path: Path) -> None:
    """`verify` runs the engine, and passes its outputs and its experts."""
    checks = built(backend, case, tmp_path / "out", shown=True).verify()
    (found,) = (each for each in checks if each.name.startswith("parity of engine-"))
    assert found.passed and "not run" not in found.detail
    assert "same experts in" in found.detail


def test_bench_times_an_engine_and_compares_its_experts(
    backend: Backend, case: RecordedCase, tmp_path: Path
) -> None:
    """`bench` gives an engine's row GPU time, parity, and the experts that its layers select."""
    bundle = built(backend, case, tmp_path / "out", shown=True)
    options: dict[str, Any] = {"engine": backend.name, "memory": False, "round_s": 0.0}
    results = moexport.bench(bundle, data=case.x, k=[2], **options)
    (row,) = (each for each in results.rows if each.engine == backend.name)
    assert row.error is None
    assert row.device_ms is not None and row.parity is not None
    assert row.routing is not None and row.routing.exact == 1.0


@pytest.mark.parametrize(
    ("precision", "lowering"),
    [("fp8", "gather"), ("fp8", "block-grouped"), ("int4", "conditional")],
)
def test_eight_bit_floats_and_four_bit_weights_stay_in_their_bounds(
    precision: Any, lowering: str, backend: Backend, tmp_path: Path
) -> None:
    """FP8 and INT4 outputs stay within the bounds of their precision."""
    gpu = first_gpu()
    if precision == "fp8" and gpu is not None and float(gpu.compute_capability) < 8.9:
        pytest.skip(f"{gpu.name} has no units for FP8")
    case = read_case("soft_moe_conv")
    bundle = moexport.export(
        moexport.load(case.weights, config=case.config),
        tmp_path / "out",
        k=2,
        target=backend.name,
        lowering=lowering,
        precision=precision,
        opset=21,
        data=case.x if precision == "fp8" else None,
        engine=EngineOptions(
            compute_capabilities=("current",) if backend.builds_without_gpu else ()
        ),
    )
    with bundle.engine(backend.name) as session:
        off = np.abs(session(case.x) - case.y(2)).max()
    assert off <= TOLERANCES[precision].rtol * np.abs(case.y(2)).max()
