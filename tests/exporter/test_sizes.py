"""The sizes that were asked for are run: batches and tokens, in an export and in `verify`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.bench.runners.exported import depends_on_batch
from moexport.errors import FeedError, ParityError, TraceError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import MANIFEST_FILE, FileRecord
from moexport.exporter.bundle.parity import sized_file
from moexport.exporter.inputs import repeated_indices
from moexport.exporter.job import calibration_job
from moexport.exporter.model import Model
from moexport.exporter.quantization.calibrate import find_ranges
from moexport.exporter.requests import CalibrateRequest
from moexport.exporter.trace import VALID_SIZES, ValidSizes, trace
from moexport.graphs.sizes import AxisRange
from moexport.tests.recorded import read_case
from torch import Tensor, nn

pytestmark = pytest.mark.plugins  # the networks are users' own

CODE = '''
import moexport
import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self, d=16, h=24):
        super().__init__()
        self.up, self.down = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mix(nn.Module):
    """A mixture whose weights depend on the batch: on its size, or on all of its tokens."""

    def __init__(self, kind):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(Expert() for _ in range(4))
        self.kind = kind

    def weights(self, x):
        scores = self.gate(x)
        if self.kind == "above 16":
            return (scores * (3.0 if x.shape[0] > 16 else 1.0)).softmax(-1)
        if self.kind == "of eight":
            return (scores * (3.0 if x.shape[0] % 8 == 0 else 1.0)).softmax(-1)
        if self.kind == "alone":
            return (scores * (3.0 if x.shape[0] == 1 else 1.0)).softmax(-1)
        weights = scores.softmax(-1)
        if self.kind == "from 8":
            return (scores * (3.0 if x.shape[0] > 7 else 1.0)).softmax(-1)
        if self.kind == "tokens below 10":
            return (scores * (3.0 if x.shape[1] < 10 else 1.0)).softmax(-1)
        if self.kind == "above 200 tokens":
            return weights * (3.0 if x.shape[0] * x.shape[1] > 200 else 1.0)
        if self.kind == "silent":
            return weights
        # Each expert chooses 48 of all tokens
        flat = weights.flatten(0, 1)
        top, at = flat.topk(48, dim=0)
        return torch.zeros_like(flat).scatter(0, at, top).view_as(weights)

    def forward(self, x):
        weights = self.weights(x)
        return sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed, self.moe, self.head = nn.Linear(6, 16), Mix(kind), nn.Linear(16, 5)

    def forward(self, x):
        x = self.embed(x)
        y = self.head((x + self.moe(x)).mean(1))
        return torch.relu(y - 100) if self.kind == "silent" else y


def build(kind="above 16"):
    torch.manual_seed(3)
    network = Net(kind).eval()
    network.example_input = torch.randn(8, 12, 6)
    return network


@moexport.adapts(Mix)
def mix(layer):
    def forward(experts, x):
        return experts(x, weights=layer.weights(x))

    return moexport.Experts(experts=layer.experts, activation="relu", forward=forward)
'''


@pytest.fixture(scope="module", autouse=True)
def networks(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    (folder / "sized_networks.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    importlib.import_module("sized_networks")


def loaded(kind: str) -> Model:
    return moexport.load("sized_networks:build", config={"kind": kind})


def off(bundle: Bundle, model: Model, x: np.ndarray) -> float:
    """How far a bundle is from the user's network in float64, of max|y|."""
    network = model.untouched.double()
    try:
        with torch.no_grad():
            y = network(torch.from_numpy(x).double()).numpy()
    finally:
        network.float()
    return float(np.abs(bundle.session()(x) - y).max() / np.abs(y).max())


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


# --- batches --------------------------------------------------------------------------------------


def test_a_network_that_changes_within_the_batches_is_refused_with_the_size(tmp_path: Path) -> None:
    for batch in ("1:1:32", "1:8:64"):
        with pytest.raises(UsageError, match="a different code path at batch size 17") as told:
            moexport.export(loaded("above 16"), tmp_path / "out", batch=batch)
        opt = batch.split(":")[1]
        assert f"batch=(1, {opt}, 16) exports" in str(told.value.hint)
        assert "batch=(17, 17, " in str(told.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("batch", "sizes"), [("1:1:16", (1, 3, 16)), ("20:24:40", (20, 33, 40))])
def test_a_graph_is_of_the_branch_that_its_batches_take(
    tmp_path: Path, batch: str, sizes: tuple[int, ...]
) -> None:
    model = loaded("above 16")
    bundle = moexport.export(model, tmp_path / "out", batch=batch)
    parity = bundle.manifest.parity
    assert parity is not None and set(sizes) <= set(parity["batches"])
    for size in sizes:
        assert off(bundle, model, inputs(size, 12, 6)) < 1e-5, size
    assert all(check.passed for check in bundle.verify())


def test_inputs_are_compared_in_batches_of_the_range_alone(tmp_path: Path) -> None:
    """The example holds 8 inputs, at which the network takes its other branch."""
    model = loaded("from 8")
    bundle = moexport.export(model, tmp_path / "out", batch="1:1:7")
    for size in (1, 7):
        assert off(bundle, model, inputs(size, 12, 6)) < 1e-5, size
    assert all(check.passed for check in bundle.verify())


@pytest.mark.parametrize("range_of", [AxisRange(2, 3, 15), AxisRange(5, 7, 9), AxisRange(3, 3, 7)])
def test_what_is_left_over_of_inputs_is_no_smaller_batch_than_the_range_has(
    range_of: AxisRange,
) -> None:
    for size in (range_of.comparison_size(), range_of.largest()):
        assert size % range_of.min == 0 and size <= range_of.max
    assert AxisRange(1, 1, 32).comparison_size() == 3
    assert AxisRange(1, 1, 32).comparison_size(4) == 12


def test_an_example_of_another_length_is_compared_with_the_tokens_of_the_range(
    tmp_path: Path,
) -> None:
    """The example holds 12 tokens, at which the network takes its other branch."""
    model = loaded("tokens below 10")
    with pytest.raises(UsageError, match="a different code path with 10 tokens") as told:
        moexport.export(model, tmp_path / "out", tokens="3:9:20")
    assert "tokens=(3, 9, 9)" in str(told.value.hint)
    bundle = moexport.export(model, tmp_path / "out", tokens="3:9:9")
    for tokens in (3, 8, 9):
        assert off(bundle, model, inputs(2, tokens, 6)) < 1e-5, tokens
    with pytest.raises(FeedError, match="10 tokens, but the graph is valid from 1 to 9"):
        bundle.session()(inputs(2, 10, 6))


@pytest.mark.parametrize(
    ("batch", "size", "held"), [("1:1:16", 17, "from 1 to 16"), ("20:24:40", 2, "from 17 on")]
)
def test_no_session_takes_a_batch_at_which_the_network_computes_something_else(
    tmp_path: Path, batch: str, size: int, held: str
) -> None:
    bundle = moexport.export(loaded("above 16"), tmp_path / "out", batch=batch)
    for session in (bundle.session(), moexport.Session(bundle.path / "model.onnx")):
        with pytest.raises(FeedError, match=f"a batch of {size}, but the graph is valid {held}"):
            session(inputs(size, 12, 6))
        assert session(inputs(16 if size > 16 else 17, 12, 6)).shape[1:] == (5,)


def test_an_export_tells_of_an_output_that_is_zero_for_all_inputs(tmp_path: Path) -> None:
    bundle = moexport.export(loaded("silent"), tmp_path / "out")
    assert any("'output' is zero for all inputs" in note for note in bundle.manifest.notes)
    heard = moexport.export(loaded("above 16"), tmp_path / "heard", batch="1:1:16")
    assert not any("is zero" in note for note in heard.manifest.notes)


@pytest.mark.parametrize("kind", ["of eight", "alone"])
def test_a_branch_that_is_no_range_of_sizes_is_found_where_pytorch_reports_it(
    tmp_path: Path, kind: str
) -> None:
    with pytest.raises(ParityError, match="batches of 1 and of 8 differ"):
        moexport.export(loaded(kind), tmp_path / "out", batch="1:3:15")


def test_verify_runs_the_batches_that_the_export_ran(tmp_path: Path) -> None:
    """The graph is damaged so that it is wrong above 16 inputs alone."""
    case = read_case("soft_moe_lucidrains")
    bundle = moexport.export(moexport.load(case.weights), tmp_path / "out", batch="1:1:32")
    assert all(check.passed for check in bundle.verify())
    path = bundle.path / "model.onnx"
    graph = onnx.load(path, load_external_data=False)
    output = graph.graph.output[0].name
    for node in graph.graph.node:
        node.output[:] = ["right" if name == output else name for name in node.output]
    constants = {"most": np.array([16], np.int64), "zero": np.array([0], np.int64)}
    graph.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in constants.items()
    )
    make = onnx.helper.make_node
    graph.graph.node.extend(
        [
            make("Shape", [graph.graph.input[0].name], ["sizes"]),
            make("Gather", ["sizes", "zero"], ["rows"]),
            make("Greater", ["rows", "most"], ["many"]),
            make("Cast", ["many"], ["more"], to=onnx.TensorProto.FLOAT),
            make("Add", ["right", "more"], [output]),
        ]
    )
    onnx.save(graph, path)
    _rehashed(bundle)
    failed = [check for check in Bundle.open(bundle.path).verify() if not check.passed]
    assert [check.name for check in failed] == ["parity of model.onnx"]
    assert failed[0].detail.startswith("in a batch of 17: ")


def _rehashed(bundle: Bundle) -> None:
    files = {name: FileRecord.of(bundle.path / name) for name in bundle.manifest.files}
    manifest = replace(bundle.manifest, files=files)
    (bundle.path / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


@pytest.mark.parametrize(
    ("sizes", "of", "probed"),
    [
        ((1, 1, 32), 1, (1, 17, 32)),
        ((20, 24, 40), 1, (20, 24, 33, 40)),
        ((1, 196, 1024), 1, (1, 196, 513, 1024)),
        ((1, 2, 2), 1, (1, 2)),
        ((3, 6, 48), 3, (3, 6, 33, 48)),
    ],
)
def test_the_edges_of_a_range_and_one_above_a_power_of_two_are_probed(
    sizes: tuple[int, int, int], of: int, probed: tuple[int, ...]
) -> None:
    assert AxisRange(*sizes).probe_sizes(of) == probed


# --- tokens ---------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Computes something else with more than 64 tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return 3.0 * y if x.shape[1] > 64 else y


class Blocks(Branching):
    """Adds to each block of 16 tokens what the blocks before it hold."""

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, dim = x.shape
        padded = nn.functional.pad(x, (0, 0, 0, (16 - tokens % 16) % 16))
        blocks = padded.reshape(rows, -1, 16, dim)
        count = blocks.shape[1]
        held = blocks.mean(2)[:, None].expand(rows, count, count, dim)
        before = torch.ones(count, count).tril(-1)[None, :, :, None]
        added = (held * before).sum(2)[:, :, None] + blocks
        y: Tensor = self.layer(added.reshape(rows, -1, dim)[:, :tokens])
        return y


def wrapped(network: Callable[[nn.Module], nn.Module]) -> Model:
    model = moexport.load(read_case("soft_moe_lucidrains").weights)
    return replace(model, module=network(model.module), family="factory")


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_no_block_of_inputs_that_come_again_is_a_later_one(count: int) -> None:
    rows = repeated_indices(count, 40)
    assert rows[:count].tolist() == [*range(count)]
    assert sorted(set(rows.tolist())) == [*range(count)]
    for block in range(1, 21):
        assert (rows != rows[np.arange(40) % block]).any()


def test_inputs_that_are_computed_together_come_again_together() -> None:
    groups = repeated_indices(8, 24, group_size=4).reshape(-1, 4)
    assert groups[:, 0].tolist() == [0, 4, 4, 0, 4, 0]
    assert (np.diff(groups) == 1).all()
    assert repeated_indices(1, 3).tolist() == [0, 0, 0]


def test_tokens_are_compared_from_the_first_to_the_last(tmp_path: Path) -> None:
    bundle = moexport.export(wrapped(lambda layer: layer), tmp_path / "out", tokens="1:30:70")
    parity = bundle.manifest.parity
    assert parity is not None and list(parity["token_counts"]) == [1, 30, 65, 70]
    assert {sized_file(tokens) for tokens in (1, 30, 65, 70)} <= bundle.manifest.files.keys()
    checks = [*bundle.verify()]
    assert all(check.passed for check in checks)
    record = bundle.path / sized_file(70)
    with np.load(record) as held:
        arrays = dict(held)
    np.savez(record, **{**arrays, "y": arrays["y"] * 1.01})
    _rehashed(bundle)
    (failed,) = [check for check in Bundle.open(bundle.path).verify() if not check.passed]
    assert failed.detail.startswith("with 70 tokens: ")


def test_tokens_beyond_a_branch_are_left_out_unless_they_were_asked_for(tmp_path: Path) -> None:
    model = wrapped(Branching)
    bundle = moexport.export(model, tmp_path / "out")
    assert bundle.manifest.tokens == "1:64:64"
    assert bundle.manifest.inputs[0].limits["tokens"] == 64
    assert any("exported for 1 to 64 tokens" in note for note in bundle.manifest.notes)
    assert off(bundle, model, inputs(2, 64, 32)) < 1e-5
    np.save(tmp_path / "x.npy", inputs(2, 65, 32))
    with pytest.raises(FeedError, match="65 tokens, but the model accepts at most 64"):
        moexport.run(bundle, tmp_path / "x.npy", tmp_path / "y.npz")
    with pytest.raises(UsageError, match="a different code path with 65 tokens") as told:
        moexport.export(model, tmp_path / "other", tokens="1:32:128")
    assert "tokens=(1, 32, 64) exports" in str(told.value.hint)
    larger = moexport.export(model, tmp_path / "larger", tokens="65:80:128")
    for tokens in (65, 100, 128):
        assert off(larger, model, inputs(2, tokens, 32)) < 1e-5


def test_what_works_in_blocks_is_right_for_any_number_of_them(tmp_path: Path) -> None:
    model = wrapped(Blocks)
    bundle = moexport.export(model, tmp_path / "out", tokens="1:20:100")
    assert bundle.manifest.tokens == "1:20:100"
    for tokens in (1, 16, 17, 32, 33, 100):
        assert off(bundle, model, inputs(2, tokens, 32)) < 1e-5, tokens
    assert all(check.passed for check in bundle.verify())


def test_a_change_at_no_whole_number_is_told_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"depends on its sizes: the trace is valid for batch <= 50/3"
    ):
        moexport.export(loaded("above 200 tokens"), tmp_path / "out")


def test_guards_of_pytorchs_own_functions_are_read() -> None:
    guard = compile("torch.sym_max(3, batch) < 9", "guard", "eval")
    valid = ValidSizes(bounds={}, guards=(guard,), traced={"batch": 2})
    assert valid.changes("batch", 1, 32) == (9,)


class Whole(Branching):
    """Computes something else for whole blocks of 16 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return 3.0 * y if x.shape[1] % 16 == 0 else y


def test_a_trace_tells_at_which_sizes_the_network_changes(tmp_path: Path) -> None:
    valid: ValidSizes = trace(wrapped(Whole)).meta[VALID_SIZES]
    assert valid.changes("tokens", 1, 100) == (16,)
    assert trace(wrapped(Branching)).meta[VALID_SIZES].bounds["tokens"][1] == 64
    above = trace(wrapped(Branching), sizes={"tokens": 70}).meta[VALID_SIZES]
    assert above.bounds["tokens"] == (65, None)
    with pytest.raises(ParityError, match=r"with 16 tokens, model\.onnx differs") as told:
        moexport.export(wrapped(Whole), tmp_path / "out", tokens="1:10:100")
    assert "tokens=(17, 17, 100) exports" in str(told.value.hint)
    with pytest.raises(ParityError, match=r"with 32 tokens, model\.onnx differs"):
        moexport.export(wrapped(Whole), tmp_path / "out", tokens="17:17:100")
    assert not (tmp_path / "out").exists()


# --- layers that look at the whole batch ----------------------------------------------------------


@pytest.mark.parametrize("batch", [4, 10])
def test_ranges_are_those_of_the_batch_that_is_fixed(batch: int) -> None:
    """What reaches the head depends on which of all tokens the experts choose."""
    model, x = loaded("choosing"), inputs(40, 12, 6)
    seen: list[Tensor] = []
    hook = model.untouched.get_submodule("head").register_forward_pre_hook(
        lambda _, given: seen.append(given[0])
    )
    with torch.no_grad():
        for part in torch.from_numpy(x).split(batch):  # type: ignore[no-untyped-call]
            model.untouched(part)
    hook.remove()
    request = CalibrateRequest(method="minmax")
    table = find_ranges(calibration_job(model, x, request, fixed={"batch": batch}))
    range_ = table.ranges["head/Gemm/input"]
    wanted = torch.cat(seen)
    assert range_.low == pytest.approx(float(wanted.min()), rel=1e-5)
    assert range_.high == pytest.approx(float(wanted.max()), rel=1e-5)


def test_int8_of_a_fixed_batch_is_as_close_as_for_any_other_layer(tmp_path: Path) -> None:
    model = loaded("choosing")
    x = inputs(80, 12, 6)
    np.save(tmp_path / "x.npy", x)
    bundle = moexport.export(
        model, tmp_path / "out", batch=4, precision="int8", data=tmp_path / "x.npy"
    )
    assert max(off(bundle, model, x[at : at + 4]) for at in range(0, 80, 4)) < 0.02
    assert all(check.passed for check in bundle.verify())


def test_a_layer_that_needs_many_tokens_is_calibrated_at_the_size_of_the_request() -> None:
    table = find_ranges(calibration_job(loaded("choosing"), inputs(38, 12, 6)))
    assert "head/Gemm/input" in table.ranges


def test_a_network_that_looks_at_the_batch_is_told_from_others() -> None:
    assert depends_on_batch(loaded("choosing"), 8)
    assert depends_on_batch(loaded("alone"), 4)
    assert not depends_on_batch(moexport.load(read_case("soft_moe_lucidrains").weights), 4)
