"""Rows of a GPU: what they are compared with, how they are told, and what can be tried without one.

Tests marked `gpu` run PyTorch there; `make gpu-check` runs them.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.engines import KINDS
from moexport.bench.journal import FILE
from moexport.bench.plan import Candidate, Case, GraphSource, select_engines
from moexport.bench.report.page import html, payload
from moexport.bench.report.summary import headline, sections, summary
from moexport.bench.report.text import method_lines, rows_table, to_csv, to_markdown
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, Row, read, to_json, write
from moexport.bench.run import bench
from moexport.bench.runners.base import Runner
from moexport.bench.runners.models import loaders
from moexport.bench.runners.pytorch import (
    PyTorch,
    on_device,
    untouched,
    with_algorithm_1,
    without_tf32,
)
from moexport.common.console import Silent
from moexport.common.latency import summarise
from moexport.data.batches import Array
from moexport.exporter.inputs import Inputs
from moexport.exporter.model import Model
from moexport.exporter.tensorrt.backends import first_gpu
from moexport.plugins.demo.digits import Digits
from moexport.tests.bench.loaders import Made
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case

RowMaker = Callable[..., Row]

ON_GPU = ("pytorch-eager-cuda", "pytorch-algorithm-2-cuda")
NO_GPU = KINDS["pytorch-eager-cuda"].missing()
QUICK = BenchRequest(warmup=1, round_s=0.0, inputs=2, samples=50, memory=False, limits=False)


@pytest.fixture
def on_gpu(results: Results, row: RowMaker) -> Results:
    """PyTorch takes 0.5 ms on the GPU, 0.4 of them in it; an engine 0.25 ms; ONNX Runtime 0.8."""
    rows = (
        row(
            16, 0.5, 1.0, engine="pytorch-eager", lowering=None, provider="cuda", device_ms=ms(0.4)
        ),
        row(8, 0.25, 1.0, engine="tensorrt", provider="tensorrt", device_ms=ms(0.125)),
        row(8, 0.8, 1.0, provider="cuda"),
    )
    return replace(results, rows=(*results.rows, *rows))


def ms(median: float) -> object:
    return summarise([[median]] * 5)


def test_a_row_of_a_gpu_is_compared_with_pytorch_on_the_gpu(on_gpu: Results) -> None:
    (section,) = sections(on_gpu)
    assert section.reference is on_gpu.rows[0]
    assert section.gpu_reference is on_gpu.rows[5]
    engine, by_onnxruntime = on_gpu.rows[6:]
    assert section.speedup(engine) == pytest.approx(2.0)
    assert section.speedup(by_onnxruntime) == pytest.approx(0.625)
    assert section.speedup(on_gpu.rows[2]) == pytest.approx(3.1)
    assert summary(section) == (
        "Deploy k = 8 of 16 in FP32: 2.0 times the speed of PyTorch on the GPU; keeps 100% of the "
        "accuracy (at least 99.9%)."
    )
    assert payload(on_gpu)["rows"][6]["against"] == "PyTorch on the GPU"


def test_without_pytorch_on_the_gpu_the_report_says_that_it_compares_with_the_cpu(
    on_gpu: Results,
) -> None:
    without = replace(on_gpu, rows=(*on_gpu.rows[:5], *on_gpu.rows[6:]))
    (section,) = sections(without)
    assert "12.4 times the speed of PyTorch on the CPU" in summary(section)
    told = " ".join(method_lines(without))
    assert (
        "with the untouched PyTorch model on the CPU, because it was not measured on the GPU"
        in told
    )


def test_the_untouched_model_is_never_the_row_that_is_recommended(
    on_gpu: Results, row: RowMaker
) -> None:
    rows = (on_gpu.rows[0], row(16, 2.0, 1.0), on_gpu.rows[5])
    (section,) = sections(replace(on_gpu, rows=rows))
    chosen = headline(section)
    assert chosen is rows[1]
    assert "on the CPU" in summary(section)


def test_gpu_times_are_shown_where_there_are_any(on_gpu: Results, results: Results) -> None:
    for view in (html, to_markdown, rows_table):
        assert "GPU ms" in view(on_gpu)
        assert "GPU ms" not in view(results)
    engine = payload(on_gpu)
    assert engine["results"]["rows"][6]["device_ms"]["p99"] == 0.125
    assert engine["rows"][6]["device_spread"] == 0
    assert "| TensorRT, grouped | 8/16 | 0.250 | 0.125 | 2.0× |" in to_markdown(on_gpu)
    rows = list(csv.DictReader(io.StringIO(to_csv(on_gpu))))
    assert [each["device_median_ms"] for each in rows[4:]] == ["", "0.4", "0.125", ""]
    assert float(rows[6]["speedup"]) == pytest.approx(2.0)


def test_the_method_says_what_is_in_each_time(on_gpu: Results, results: Results) -> None:
    told = " ".join(method_lines(on_gpu))
    for words in (
        "wall-clock times include the copies",
        "spinning",
        "CUDA graphs",
        "two CUDA events",
    ):
        assert words in told
    assert "ONNX Runtime (cuda): wall clock only, no GPU ms." in told
    against = (
        "compared with the untouched PyTorch model on the GPU, the others with the one on the CPU"
    )
    assert against in told
    assert "GPU" not in " ".join(method_lines(results))


def test_the_method_says_which_time_a_smaller_k_changes(results: Results, row: RowMaker) -> None:
    cuda = {"provider": "cuda", "lowering": "gather"}
    rows = (
        row(16, 0.9, 1.0, **cuda, device_ms=ms(0.5)),
        row(4, 0.9, 1.0, **cuda, device_ms=ms(0.125)),
        row(2, 0.8, 1.0, provider="cuda", device_ms=ms(0.7), no_cuda_graph="it has an If"),
    )
    told = method_lines(replace(results, rows=(*results.rows, *rows)))
    (changed,) = [line for line in told if "k 16 → 4" in line]
    assert "GPU ms 0.500 → 0.125; array to array ms unchanged within the spread" in changed
    assert "ONNX Runtime, grouped, cuda: launched kernel by kernel: it has an If." in told


def test_gpu_times_are_in_the_file_and_its_schema(on_gpu: Results, tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")  # which a machine with a GPU need not have
    from moexport.tests.bench.test_schema import problems

    write(on_gpu, tmp_path / "results.json")
    assert read(tmp_path / "results.json") == on_gpu
    body = json.loads(to_json(on_gpu))
    assert problems(body) == []
    assert body["rows"][6]["device_ms"]["median"] == 0.125


def test_the_engines_of_a_gpu_are_absent_with_the_reason() -> None:
    chosen = select_engines(KINDS)
    absent = {each.engine: each.reason for each in chosen.absent}
    for name in (*ON_GPU, "pytorch-compile-cuda"):
        assert KINDS[name].provider == "cuda"
        assert (name in chosen.names) == (name not in absent)
    if first_gpu() is None:
        assert absent["pytorch-eager-cuda"] == "there is no NVIDIA GPU, or no driver for it"
    elif torch.version.cuda is None:
        assert absent["pytorch-eager-cuda"].startswith("this PyTorch was built without CUDA")
    # Sweep for or not, PyTorch is measured on the GPU beside what is measured there.
    beside = select_engines(("onnxruntime-cuda",)).names
    assert ("pytorch-eager-cuda" in beside) == ("onnxruntime-cuda" in beside and NO_GPU is None)


class Clocked(Runner):
    """Computes as a graph of k = 2 and tells the processor time of its own thread."""

    def __init__(self, model: Model) -> None:
        self.torch = with_algorithm_1(model, 2, "masked")

    def infer(self, x: Inputs, output: int = 0) -> Array:
        return self.torch.infer(x)

    def selected(self, x: Inputs) -> dict[str, Array]:
        return self.torch.with_routing(x).chosen

    def device_ms(self, x: Inputs) -> float:
        begun = time.thread_time_ns()
        self.torch.infer(x)
        return (time.thread_time_ns() - begun) / 1e6


class KilledError(BaseException):
    """What ends a process."""


class Killed(Silent):
    """Ends the run when its last batch size is timed."""

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        if "batch 3: timing" in text:
            raise KilledError


def test_a_sweep_that_goes_on_keeps_the_times_of_the_device(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    candidate = Candidate(
        "digits", model, graphs=(GraphSource(2, "dense", Made(lambda: Clocked(model))),)
    )
    settings = replace(QUICK, batch=(1, 3))
    with pytest.raises(KilledError):
        bench([candidate], digits.test, replace(settings, out=tmp_path, progress=Killed()))
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    label = "digits: onnxruntime dense fp32 k=2/4"
    kept = [each["device_ms"][label] for each in lines if each.get("kind") == "round"]
    again = bench([candidate], digits.test, replace(settings, out=tmp_path))
    first, second = (row for row in again.rows if row.engine == "onnxruntime")
    assert first.device_ms == summarise(kept)
    assert second.device_ms is not None
    assert second.device_ms.n == second.latency_ms.n if second.latency_ms else False
    assert all(row.device_ms is None for row in again.rows if row.engine == "pytorch-eager")
    assert read(tmp_path / "results.json") == again


def test_the_engines_of_a_gpu_are_cases_with_copies_of_their_own(model: Model) -> None:
    candidate = Candidate("digits", model, ks=(4, 2), engines=ON_GPU)
    found = loaders(candidate)
    assert [(c.engine, c.provider, c.k) for c in found] == [
        ("pytorch-eager", "cpu", 4),
        ("pytorch-eager", "cuda", 4),
        ("pytorch-algorithm-2", "cuda", 2),
    ]
    assert len({c.label for c in found}) == 3


@pytest.mark.skipif(NO_GPU is None, reason="PyTorch runs on this machine's GPU")
def test_what_cannot_run_on_a_gpu_is_a_row_with_its_error(model: Model, digits: Digits) -> None:
    candidate = Candidate("digits", model, ks=(2,), engines=ON_GPU)
    found = bench([candidate], digits.test, QUICK)
    assert [row.error is None for row in found.rows] == [True, False, False]


@pytest.mark.parametrize("name", [*SOFT_MOE, *MUMOE])
def test_a_copy_on_another_device_leaves_the_model_where_it_is(name: str) -> None:
    """On the device `meta`, which needs no hardware; most operations refuse to mix it with CPUs."""
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config)
    before = [parameter.data_ptr() for parameter in model.module.parameters()]
    copy = on_device(model, "meta")
    tensors = (*copy.module.parameters(), *copy.module.buffers())
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    x = torch.from_numpy(case.x).to("meta")
    with torch.inference_mode():
        for run in (untouched(copy), with_algorithm_1(copy, min(case.ks), "masked")):
            y = run.module(x)
            assert (y.device.type, tuple(y.shape)) == ("meta", case.y().shape)
    assert [parameter.data_ptr() for parameter in model.module.parameters()] == before


def test_what_two_modules_share_their_copies_share(model: Model) -> None:
    copy = on_device(replace(model, original=model.module), "meta")
    assert copy.original is copy.module
    assert copy.module is not model.module
    shared = with_algorithm_1(copy, 2, "selected").module
    assert {id(p) for p in shared.parameters()} == {id(p) for p in copy.module.parameters()}


def test_tf32_is_off_within_a_benchmark_and_as_it_was_after() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with without_tf32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=f"{NO_GPU}: make gpu-check")
def test_pytorch_on_the_gpu_is_measured_beside_the_cpu(model: Model, digits: Digits) -> None:
    """PyTorch's own rows on the GPU have GPU times, and the CPU's outputs within 1e-3."""
    found = bench([Candidate("digits", model, ks=(2,), engines=ON_GPU)], digits.test, QUICK)
    cpu, gpu, selecting = found.rows
    assert [row.error for row in found.rows] == [None] * 3
    assert cpu.device_ms is None
    for row in (gpu, selecting):
        assert row.device_ms is not None
        assert row.latency_ms is not None
        assert row.parity is not None
        assert 0 < row.device_ms.median < 1000
        assert row.parity.max_abs < 1e-3
    assert {p.device.type for p in model.module.parameters()} == {"cpu"}
    (section,) = sections(found)
    assert section.gpu_reference is gpu


@pytest.mark.gpu
@pytest.mark.skipif(
    KINDS["pytorch-compile-cuda"].missing() is not None,
    reason=f"{KINDS['pytorch-compile-cuda'].missing()}: make gpu-check",
)
def test_a_model_is_compiled_for_the_gpu(model: Model, digits: Digits) -> None:
    """`torch.compile` on the GPU gives PyTorch's outputs, and GPU times."""
    case = Case("digits", "pytorch-compile", 4, 4, "cuda")
    candidate = Candidate("digits", model, engines=("pytorch-compile-cuda",))
    run = loaders(candidate, (2,))[case]()
    x = digits.test.inputs[:2]
    np.testing.assert_allclose(run.infer(x), PyTorch(model.module).infer(x), rtol=1e-3, atol=1e-3)
    device_ms = run.device_ms(x)
    assert device_ms is not None
    assert 0 < device_ms < 1000
