"""Layers that a graph cannot tell apart, and what a session takes for k."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.errors import BundleError, EngineError, FeedError, TraceError, UsageError
from moexport.exporter import session as session_module
from moexport.exporter.bundle.manifest import GraphFacts
from moexport.exporter.export import plan_job
from moexport.exporter.job import export_job
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.exporter.options import ExportOptions
from moexport.exporter.session import Session, SessionOptions, described
from moexport.graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights
from moexport.tests.recorded import DATA
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn


class Backbone(nn.Module):
    """Calls one layer as often as it is told."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        weights = SoftMoEWeights(
            phi=torch.randn(6, 4, 1, generator=random),
            w1=torch.randn(4, 6, 6, generator=random),
            b1=None,
            w2=None,
            b2=None,
        )
        self.moe = SoftMoE(SoftMoESpec("moe", 4, 1, 6, 0, 6, expert="linear"), weights)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x + self.moe(x)
        return x


def backbone_model(calls: int) -> Model:
    shape = ("batch", "tokens", 6)
    return Model(
        module=Backbone(calls).eval(),
        family="factory",
        config={},
        source=Source("host", ()),
        inputs=(TensorSpec("input", "float32", shape),),
        outputs=(TensorSpec("output", "float32", shape),),
    )


def test_a_layer_that_is_called_once_is_planned_once() -> None:
    (graph,) = plan_job(export_job(backbone_model(1), ExportOptions(k=2))).graphs
    assert [layer.name for layer in graph.layers] == ["moe"]


def test_a_layer_that_is_called_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="layer moe is called 2 times") as caught:
        moexport.export(backbone_model(2), tmp_path / "out")
    assert caught.value.hint is not None
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    folder = tmp_path_factory.mktemp("session")
    return moexport.export(model, folder / "out", k="input", lowering="gather").session()


@pytest.mark.parametrize("k", [0, -1, 5, 2.5])
def test_a_session_refuses_a_k_outside_1_to_n(session: Session, k: int) -> None:
    x = np.ones((1, 5, 32), np.float32)
    with pytest.raises(UsageError, match=f"k = {k}: the model has 4 experts"):
        session(x, k)
    assert session(x, 4).shape == (1, 5, 32)
    assert np.array_equal(session(x, np.int64(2)), session(x, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "k", [np.array([2]), np.array([1, 2]), [2], "2", float("nan"), float("inf"), True], ids=repr
)
def test_a_session_refuses_a_k_that_is_no_number(session: Session, k: int) -> None:
    with pytest.raises(UsageError, match="one whole number is expected"):
        session(np.ones((1, 5, 32), np.float32), k)


@pytest.mark.parametrize("shape", [(0, 5, 32), (2, 0, 32)])
def test_a_session_refuses_an_input_without_numbers(
    session: Session, shape: tuple[int, ...]
) -> None:
    with pytest.raises(FeedError, match=r"input 'input' is empty: \(") as caught:
        session(np.ones(shape, np.float32), 2)
    assert caught.value.hint is not None


@pytest.mark.parametrize("k", [0, None, True, 2.0, 5, [1, 2], [0], "some"])
def test_python_refuses_a_k_that_cannot_be_meant(k: object, tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    with pytest.raises(UsageError, match=r"\bk="):
        moexport.export(model, tmp_path / "out", k=k)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("k", [2, np.int64(2), [2], (2,), 0.5, "1/2"])
def test_python_takes_k_in_every_form(k: int, tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    bundle = moexport.export(model, tmp_path / "out", k=k)
    assert [layer.k for layer in bundle.manifest.layers] == [2]


def test_the_options_of_a_session_are_keywords(tmp_path: Path) -> None:
    bundle = moexport.export(backbone_model(1), tmp_path / "out", k=2)
    session = bundle.session(threads=2, spin_ms=0, prepack=False, profile=tmp_path / "times")
    wanted = SessionOptions(threads=2, spin_ms=0, prepack=False, profile=tmp_path / "times")
    assert session.options == wanted
    x = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)
    both = bundle.session("dense", SessionOptions(threads=1, plan_memory=False), threads=2)
    assert both.options == SessionOptions(threads=2, plan_memory=False)
    np.testing.assert_allclose(both(x), session(x), rtol=1e-5, atol=1e-6)
    assert bundle.session(provider="cpu").provider == "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "threads=0: not a number"),
        ({"threads": "2"}, "threads='2': not a number"),
        ({"spin_ms": -1}, "spin_ms=-1: not a time"),
        ({"provider": "gpu"}, "ONNX Runtime has no gpu"),
    ],
)
def test_options_that_a_session_cannot_have_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    bundle = moexport.export(backbone_model(1), tmp_path / "out", k=2)
    with pytest.raises(UsageError, match=words):
        bundle.session(**options)


def test_a_session_without_a_memory_plan_computes_the_same(tmp_path: Path) -> None:
    bundle = moexport.export(backbone_model(1), tmp_path / "out", k=2, lowering="grouped")
    planned, unplanned = (
        bundle.session(options=SessionOptions(plan_memory=plan, threads=1))
        for plan in (True, False)
    )
    random = np.random.default_rng(0)
    for batch in (1, 3, 2):  # buffers of one size are not those of the next
        x = random.standard_normal((batch, 5, 6)).astype(np.float32)
        answers = unplanned(x)
        assert np.abs(answers).max() > 0
        np.testing.assert_array_equal(answers, planned(x))


def test_the_threads_of_a_session_rest_as_soon_after_a_call_as_is_asked(tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_mnist" / "weights.pt")
    bundle = moexport.export(model, tmp_path / "out", lowering="dense")
    x = np.random.default_rng(0).random((64, 1, 28, 28), dtype=np.float32)

    def used_s(spin_ms: float | None) -> float:
        """Processor time in the 20 ms after a call, the median of ten."""
        session = bundle.session(options=SessionOptions(threads=2, spin_ms=spin_ms))
        found = []
        for _ in range(10):
            session(x)
            begun = time.process_time()
            time.sleep(0.02)
            found.append(time.process_time() - begun)
        return float(np.median(found))

    resting, briefly, usually = used_s(0), used_s(1), used_s(None)
    assert resting < 0.005
    assert briefly < 0.01
    assert usually > max(resting, briefly)


def test_python_refuses_what_is_no_feed(tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    with pytest.raises(UsageError, match="data=5: not a string or a path or an array"):
        moexport.export(model, tmp_path / "out", data=5)
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_read_once_is_refused_before_it_is_read(tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    feed = iter([np.ones((2, 5, 32), np.float32)])
    with pytest.raises(
        FeedError, match="which can be read only once, but this export reads it 2 times"
    ):
        moexport.export(model, tmp_path / "out", data=feed, precision="int8")
    assert len(list(feed)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_plan_opens_the_data_that_it_is_given(tmp_path: Path) -> None:
    model = moexport.load(DATA / "soft_moe_lucidrains" / "weights.pt")
    with pytest.raises(FeedError, match="no such feed"):
        moexport.plan(model, tmp_path / "out", data=str(tmp_path / "none.npz"))
    with pytest.raises(FeedError, match="needs"):
        moexport.plan(model, tmp_path / "out", data=np.ones((2, 5, 33), np.float32))
    assert list(tmp_path.iterdir()) == []


def written(folder: Path, inputs: list[tuple[str, int]], nodes: list[onnx.NodeProto]) -> Path:
    """A graph of somebody else's."""
    ports = [helper.make_tensor_value_info(name, kind, ["batch", 4]) for name, kind in inputs]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "other", ports, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "has no inputs, but one numeric input is expected"),
        ([("a", 1), ("b", 1)], r"has a \(tensor\(float\)\), b \(tensor\(float\)\)"),
        ([("a", TensorProto.STRING)], r"has a \(tensor\(string\)\)"),
    ],
)
def test_a_graph_with_other_inputs_is_an_error(
    inputs: list[tuple[str, int]], message: str, tmp_path: Path
) -> None:
    one = helper.make_node("Constant", [], ["y"], value_float=1.0)
    with pytest.raises(BundleError, match=message):
        Session(written(tmp_path, inputs, [one]))


def test_a_run_that_fails_is_an_error_without_the_runtimes_sources(tmp_path: Path) -> None:
    shape = helper.make_node("Constant", [], ["shape"], value_ints=[3, 5])
    path = written(
        tmp_path, [("x", 1)], [shape, helper.make_node("Reshape", ["x", "shape"], ["y"])]
    )
    with pytest.raises(EngineError, match=r"the run failed in CPUExecutionProvider") as found:
        Session(path)(np.zeros((2, 4), np.float32))
    assert "onnxruntime_src" not in found.value.message
    assert "verify" in (found.value.hint or "")


@pytest.mark.parametrize("inside", [False, True])
def test_a_node_that_would_end_the_process_is_refused(inside: bool, tmp_path: Path) -> None:
    node = helper.make_node("GatherND", ["x", "x"], ["y"], name="selected", batch_dims=-1)
    if inside:  # the branch of an If
        value = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        branch = helper.make_graph([node], "branch", [], [value])
        node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    with pytest.raises(BundleError, match=r"selected \(GatherND\) has -1 batch dimensions"):
        Session(written(tmp_path, [("x", 1)], [node]))


def test_an_array_with_a_mask_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [("x", 1)], [helper.make_node("Identity", ["x"], ["y"])])
    x = np.ma.masked_array(np.ones((2, 4), np.float32), mask=True)
    with pytest.raises(FeedError, match="input 'x' is a masked array"):
        Session(path)(x)
    assert Session(path)(x.filled(0)).sum() == 0


class Evaluated(Session):
    """A runtime that has a `call` of its own and no more, as another package may write it."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(path)
        self.path, self.options = path, SessionOptions()
        self.describe(
            described(graph),
            [value.name for value in graph.graph.output],
            GraphFacts.of(graph, path.name),
        )
        self._evaluator = ReferenceEvaluator(graph)

    def call(self, wanted: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        return list(self._evaluator.run(list(wanted), dict(feeds)))


def test_a_runtime_with_a_call_alone_is_timed_by_it(tmp_path: Path) -> None:
    weights = DATA / "soft_moe_lucidrains" / "weights.pt"
    bundle = moexport.export(weights, tmp_path / "out", k="input", verify=False, threads=1)
    x = np.random.default_rng(0).normal(size=(2, 16, 32)).astype(np.float32)
    session, ours = Evaluated(bundle.graph_file("model.onnx")), bundle.session()
    (timed,) = session.bound(x, 2)()
    assert np.abs(timed - ours.run(x, 2)["output"]).max() < 1e-5
    assert np.abs(timed - ours.run(x, 4)["output"]).max() > 1e-3


class Failing(Evaluated):
    """A runtime whose `call` fails, without a `failure` and `errors`."""

    def call(self, wanted: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        raise KeyError("no kernel")


def test_a_runtime_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [("x", 1)], [helper.make_node("Identity", ["x"], ["y"])])
    monkeypatch.setattr(session_module, "runtime_names", lambda: ("onnxruntime", "theirs"))
    session = Failing(path)
    session.options = SessionOptions(runtime="theirs")
    with pytest.raises(
        EngineError, match=r"the run failed in theirs: \w+Error: '?no kernel"
    ) as told:
        session.run(np.ones((2, 4), np.float32))
    assert isinstance(told.value.__cause__, LookupError)
    with pytest.raises(FeedError, match="input 'x'"):
        session.run(np.ones(2, np.float32))


class Full(Session):
    """A session on a GPU whose memory runs out when inputs are copied to it."""

    def feeds(self, x: Any, k: int | None = None) -> dict[str, Any]:
        raise RuntimeError("CUDA out of memory")


def test_a_failure_to_copy_inputs_names_the_runtime(tmp_path: Path) -> None:
    session = Full(written(tmp_path, [("x", 1)], [helper.make_node("Identity", ["x"], ["y"])]))
    with pytest.raises(EngineError, match="memory ran out for a batch of 2"):
        session.run(np.ones((2, 4), np.float32))


def test_a_session_takes_no_kernels_that_round_rows_whole() -> None:
    from moexport.exporter.session import _settings

    assert _settings(SessionOptions()).get_session_config_entry("mlas.disable_kleidiai") == "1"
