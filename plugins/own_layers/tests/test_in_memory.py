"""Networks in memory and dicts of arrays are accepted in place of files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.examples.own_network import GestureNet
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.recorded import DATA
from torch import Tensor, nn

pytestmark = pytest.mark.plugins


def network(dtype: torch.dtype = torch.float32) -> GestureNet:
    torch.manual_seed(0)
    return GestureNet(classes=5, dim=16, experts=8).to(dtype)


def inputs(count: int = 12) -> Tensor:
    return torch.randn(count, 64, 6, generator=torch.Generator().manual_seed(1))


def kept(net: nn.Module, experts: int) -> nn.Module:
    """The network in float64 with every combine weight but the k largest columns set to zero."""
    twin: nn.Module = copy.deepcopy(net).double().eval()
    layer: Any = twin.moe

    def forward(tokens: Tensor) -> Tensor:
        x = nn.functional.normalize(tokens, dim=-1)
        phi = layer.scale * nn.functional.normalize(layer.phi, dim=0)
        logits = torch.einsum("bmd,dnp->bmnp", x, phi)
        combine = logits.flatten(2).softmax(dim=-1).view_as(logits)
        chosen = combine.sum(dim=(1, 3)).topk(experts, dim=-1).indices
        mask = torch.zeros(combine.shape[0], combine.shape[2], dtype=torch.float64)
        combine = combine * mask.scatter(1, chosen, 1.0)[:, None, :, None]
        slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(dim=1), x)
        outputs = torch.stack([f(slots[:, i]) for i, f in enumerate(layer.experts)], dim=1)
        return torch.einsum("bmnp,bnpd->bmd", combine, outputs)

    layer.forward = forward
    return twin


@pytest.mark.path
def test_a_network_in_memory_is_exported_and_computes_what_it_does(tmp_path: Path) -> None:
    net, x = network(), inputs()
    bundle = moexport.export(net, tmp_path / "out", k=3, data={"input": x})
    with torch.no_grad():
        expected = kept(net, 3)(x.double()).numpy()
    actual = bundle.session()(x.numpy())
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_network_in_memory_stays_as_it_is(tmp_path: Path) -> None:
    net = network(torch.bfloat16).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    moexport.export(net, tmp_path / "out", k=4, data=inputs())
    assert net.training
    assert all(p.requires_grad and p.dtype == torch.bfloat16 for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_weights_are_shared_where_they_can_be() -> None:
    net = network()
    model = moexport.load(net, example=inputs(3))
    ours = {p.data_ptr() for p in model.module.parameters()}
    assert net.head.weight.data_ptr() in ours


def test_a_compiled_network_is_named_as_it_was_and_stays_compiled() -> None:
    compiled: Any = torch.compile(network())
    assert moexport.load(compiled).source.path == "GestureNet (in memory)"
    assert type(compiled).__name__ == "OptimizedModule"


def test_a_bundle_records_the_network_and_is_verified_without_it(tmp_path: Path) -> None:
    net = network()
    bundle = moexport.export(net, tmp_path / "out", k=4, data={"input": inputs().numpy()})
    source = bundle.manifest.source
    assert source.path == "GestureNet (in memory)"
    assert len(source.sha256) == 64
    checks = [*moexport.verify(Bundle.open(tmp_path / "out"))]
    assert all(check.passed for check in checks)
    assert any(check.name == "parity of model.onnx" for check in checks)
    other = network()
    with torch.no_grad():
        other.head.bias.add_(1)
    assert moexport.load(net).source.sha256() == source.sha256
    assert moexport.load(other).source.sha256() != source.sha256


def test_a_benchmark_needs_the_network_beside_its_bundle(tmp_path: Path) -> None:
    net, x = network(), inputs()
    data = {"input": x, "label": torch.arange(12) % 5}
    bundle = moexport.export(net, tmp_path / "out", k=4, data=data)
    asked: Any = {"data": data, "engine": "onnxruntime", "threads": 1, "memory": False}
    with pytest.raises(moexport.UsageError, match="that network is not in a file") as refused:
        moexport.bench(bundle, **asked)
    assert "moexport.bench([model, bundle])" in str(refused.value.hint)
    results = moexport.bench([net, bundle], round_s=0.01, inputs=1, **asked)
    assert {row.k for row in results.rows} >= {4}


def test_inspect_and_calibrate_take_a_network_and_a_dict(tmp_path: Path) -> None:
    net, x = network(), inputs()
    report = moexport.inspect(net, data={"x": x, "label": np.zeros(12, np.int64)})
    assert [layer.experts for layer in report.layers] == [8]
    table = moexport.calibrate(net, {"input": x}, k=4)
    bundle = moexport.export(net, tmp_path / "out", k=4, precision="int8", calibration=table)
    assert bundle.manifest.precision == "int8"


def test_a_dict_and_the_file_of_it_give_the_same_bundle(tmp_path: Path) -> None:
    net, x = network(), inputs()
    np.savez(tmp_path / "data.npz", input=x.numpy())
    one = moexport.export(net, tmp_path / "one", k=4, precision="int8", data=tmp_path / "data.npz")
    two = moexport.export(net, tmp_path / "two", k=4, precision="int8", data={"input": x})
    assert one.manifest.files["weights.bin"] == two.manifest.files["weights.bin"]


class TwoInputs(nn.Module):
    """Adds a vector to the input tokens of a Soft MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = network().moe

    def forward(self, tokens: Tensor, shift: Tensor) -> Tensor:
        y: Tensor = self.moe(tokens + shift[:, None])
        return y.mean(dim=1)


def test_several_inputs_are_given_by_name(tmp_path: Path) -> None:
    torch.manual_seed(2)
    net, tokens, shift = TwoInputs(), torch.randn(6, 9, 16), torch.randn(6, 16)
    data = {"tokens": tokens, "shift": shift, "label": torch.zeros(6, dtype=torch.long)}
    bundle = moexport.export(net, tmp_path / "out", k=8, data=data)
    assert [port.name for port in bundle.manifest.inputs] == ["tokens", "shift"]
    with torch.no_grad():
        expected = copy.deepcopy(net).double()(tokens.double(), shift.double()).numpy()
    actual = bundle.session()({"tokens": tokens.numpy(), "shift": shift.numpy()})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_what_a_network_in_memory_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(moexport.UsageError, match="has no values yet") as lazy:
        moexport.load(nn.Sequential(nn.LazyLinear(3)), example=inputs())
    assert "call the network once" in str(lazy.value.hint)
    with pytest.raises(moexport.FamilyError, match="has no Soft MoE or muMoE layer"):
        moexport.load(nn.Sequential(nn.Linear(6, 3)), example=inputs())
    plain = TwoInputs()
    wrong: Any = 3
    unreachable: Any = network()
    with pytest.raises(moexport.FeedError, match="the input 'shift' is missing"):
        moexport.export(plain, tmp_path / "out", data={"tokens": torch.zeros(3, 9, 16)})
    with pytest.raises(moexport.UsageError, match="expected a model, not int"):
        moexport.export(wrong, tmp_path / "out")
    with pytest.raises(moexport.UsageError, match="cannot use a model in memory"):
        moexport.bench_on_ray(unreachable, ray="local")
    with pytest.raises(moexport.UsageError, match="takes no arguments"):
        moexport.load(network(), config={"classes": 3})
    with pytest.raises(moexport.FeedError, match="but no 'input'"):
        moexport.export(network(), tmp_path / "out", data={"a": inputs(), "b": inputs()})
    with pytest.raises(moexport.FeedError, match="'shift' has 2 inputs, but 'tokens' has 3"):
        one = {"tokens": torch.randn(3, 9, 16), "shift": torch.randn(3, 16)}
        sizes = {**one, "shift": torch.randn(2, 16)}
        moexport.calibrate(moexport.load(plain, example=one), sizes)
    assert [*tmp_path.iterdir()] == []


def test_a_path_is_taken_where_a_model_is(tmp_path: Path) -> None:
    weights = DATA / "soft_moe_mnist" / "weights.pt"
    bundle = moexport.export(weights, tmp_path / "out", k=4)
    assert bundle.manifest.source.path == str(weights)
    with pytest.raises(moexport.CheckpointError, match="no such file"):
        moexport.export("missing.pt", tmp_path / "none")
