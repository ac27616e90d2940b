"""A user's own forward around a bank of experts: the message names its mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import FamilyError, MoexportError, ParityError, TraceError, UsageError
from moexport.exporter.model import Model
from moexport.plugins.token_routed.own_forward import like, result_of
from torch import Tensor, nn
from torch.nn import functional as F

DIM, N, P = 8, 3, 2
X = np.random.default_rng(0).standard_normal((4, 6, DIM)).astype(np.float32)


def expert() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 12), nn.GELU(), nn.Linear(12, DIM))


class Layer(nn.Module):
    """A Soft MoE with a mask by a number, and the input added."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, N, P))
        self.experts = nn.ModuleList(expert() for _ in range(N))
        self.width = DIM

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
        combine = logits.flatten(2).softmax(-1).view_as(logits)
        return torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), x), combine

    def forward(self, x: Tensor) -> Tensor:
        slots, combine = self.parts(x)
        outputs = torch.stack([f(slots[:, e]) for e, f in enumerate(self.experts)], 1)
        return x + torch.einsum("bmnp,bnpd->bmd", combine, outputs)


class Net(nn.Module):
    """Calls the layer, and may read its attributes or pass more arguments."""

    def __init__(self, reads: bool = False, more: bool = False) -> None:
        super().__init__()
        self.layer = Layer() if not more else More()
        self.reads, self.more = reads, more

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, scale=2.0) if self.more else self.layer(x)
        return y * self.layer.width if self.reads else y


class More(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def net(**given: bool) -> Net:
    torch.manual_seed(0)
    return Net(**given)


def loaded(adapt: Callable[[Any], Any], **given: bool) -> Model:
    adapt.__annotations__ = {"layer": Layer}
    sys.modules["own_forward_net"] = sys.modules[__name__]
    return moexport.load("own_forward_net:net", config=given, example=X, adapter=adapt)


def bank(forward: Callable[..., Any], **options: Any) -> Callable[[Layer], moexport.Experts]:
    """An adapter whose forward takes the layer first."""

    def adapt(layer: Layer) -> moexport.Experts:
        def bound(experts: Any, *args: Any, **named: Any) -> Any:
            return forward(layer, experts, *args, **named)

        return moexport.Experts(experts=layer.experts, forward=bound, **options)

    return adapt


def right(layer: Layer, experts: Any, x: Tensor) -> Any:
    slots, combine = layer.parts(x)
    return x + experts(slots, combine=combine)


def test_the_right_one_is_exported_and_the_layer_may_be_read(tmp_path: Path) -> None:
    model = loaded(bank(right), reads=True)
    moexport.export(model, tmp_path / "out", k=2)
    assert list(model.layers) == ["layer.experts"]
    assert all(check.passed for check in moexport.verify(tmp_path / "out"))


def twice(layer: Layer, experts: Any, x: Tensor) -> Any:
    slots, combine = layer.parts(x)
    return x + (experts(slots, combine=combine) + experts(slots, combine=combine)) / 2


def tokens_first(layer: Layer, experts: Any, x: Tensor) -> Any:
    slots, combine = layer.parts(x)
    return x + experts(slots.transpose(1, 2), combine=combine)


def numbered(layer: Layer, experts: Any, x: Tensor) -> Any:
    return x + experts(x, torch.full((*x.shape[:2], 1), N), torch.ones(*x.shape[:2], 1))


def without_the_input(layer: Layer, experts: Any, x: Tensor) -> Any:
    slots, combine = layer.parts(x)
    return experts(slots, combine=combine)


@pytest.mark.parametrize(
    ("forward", "options", "says"),
    [
        (twice, {}, "its forward calls our layer 2 times"),
        (lambda layer, experts, x: x, {}, "its forward calls our layer not at all"),
        (tokens_first, {}, r"slots \[4, 2, 3, 8\] and C \[4, 6, 3, 2\] to experts\(slots"),
        (lambda layer, experts, x: experts(x, weights=x), {}, r"w must be \[\.\.\., 3\] for"),
        (lambda layer, experts, x: experts(x), {}, r"its forward calls experts\(x\)"),
        (lambda layer, experts, x: experts(x, 1, 2), {}, "a int as index"),
        (numbered, {}, "chose expert 3, but the experts are 0 to 2"),
        (lambda layer, experts, x: {"loss": 1.0}, {}, "returned a dict without a tensor"),
        (lambda layer, experts, x: x + layer.nothing, {}, "its forward failed: AttributeError"),
        (lambda layer, experts: 1, {}, "its forward failed: TypeError"),
        (lambda layer, experts, x: experts(x[..., :4], weights=x[..., :N]), {}, r"tokens \(…, 8\)"),
        (right, {"activation": "relu"}, "it matches with activation='gelu'$"),
        (right, {"limit": 2.0}, "limit and up_offset need a gate"),
        (without_the_input, {}, "once x is subtracted from y: the layer adds its input$"),
        (right, {"router": right}, "router and forward are both given"),
    ],
)
def test_a_forward_that_is_wrong_says_in_which_way(
    forward: Callable[..., Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises((UsageError, ParityError), match=says) as refused:
        loaded(bank(forward, **options))
    assert refused.value.hint and "--help" not in refused.value.hint


def test_a_forward_that_cannot_be_traced_is_told_with_its_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def by_value(layer: Layer, experts: Any, x: Tensor) -> Any:
        return right(layer, experts, x) if float(x.sum()) < 1e9 else x

    says = r"PyTorch cannot trace this .* \(test_own_forward.py, line [0-9]+: return right\("
    with pytest.raises(TraceError, match=says):
        moexport.export(loaded(bank(by_value)), tmp_path / "out")
    assert capfd.readouterr() == ("", "")


def soft(layer: Layer) -> moexport.SoftMoE:
    return moexport.SoftMoE(phi=layer.phi, experts=layer.experts, residual=True)


def test_what_the_network_reads_of_a_layer_is_named() -> None:
    with pytest.raises(FamilyError, match=r"reads the attribute width of a layer") as refused:
        loaded(soft, reads=True)
    assert "an adapter with a forward" in str(refused.value.hint)


def test_a_layer_that_is_called_with_more_is_told_what_and_what_to_write() -> None:
    with pytest.raises(FamilyError, match=r"more than its tokens: scale=float 2\.0") as refused:
        loaded(soft, more=True)
    assert "forward=lambda experts, x, scale: …" in str(refused.value.hint)

    def scaled(layer: Layer, experts: Any, x: Tensor, scale: float) -> Any:
        return right(layer, experts, x) * scale

    assert list(loaded(bank(scaled), more=True).layers) == ["layer.experts"]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.back = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.back(torch.sin(self.fc(x)))
        return y


class Branching(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) if x.sum() > 0 else self.back(x)
        return y


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Odd(), "a step that is not supported in an expert: sin of the first map's output"),
        (Branching(), "its forward cannot be read: TraceError"),
        (nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), "not supported in an expert: a Tanh"),
        (nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3))), "another linear map"),
        (nn.Identity(), "does not return an expert's output"),
    ],
)
def test_experts_of_any_other_modules_are_refused_with_the_step(
    module: nn.Module, says: str
) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        moexport.Experts(experts=[module] * N).build("")
    assert "an expert is one linear map, two" in str(refused.value.hint) or "maps" in says


class Half(nn.Module):
    def __init__(self, up_first: bool) -> None:
        super().__init__()
        self.both, self.down, self.up_first = nn.Linear(DIM, 10), nn.Linear(5, DIM), up_first

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.both(x).chunk(2, dim=-1)
        gate, up = (other, one) if self.up_first else (one, other)
        y: Tensor = self.down(gate * torch.sigmoid(gate) * up)
        return y


class Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(DIM, 5)), nn.Parameter(torch.randn(DIM, 5))
        self.b = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(x @ self.w1) ** 2, self.w2, self.b)


@pytest.mark.parametrize(
    "made",
    [
        expert,
        lambda: Half(up_first=False),
        lambda: Half(up_first=True),
        Parameters,
        lambda: nn.Linear(DIM, 5),
        lambda: nn.Sequential(nn.Linear(DIM, 5), nn.RMSNorm(5), nn.SiLU(), nn.Linear(5, 4)),
        lambda: nn.Sequential(nn.Linear(DIM, 5), nn.LayerNorm(5), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(DIM, 5), nn.Linear(5, DIM), nn.GELU("tanh")),
    ],
)
def test_a_module_is_read_as_what_it_computes(made: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    modules = [made() for _ in range(N)]
    x = torch.randn(7, DIM)
    described = moexport.Experts(experts=modules)
    chosen, given = described.build(""), described.build_for_slots("", 1)
    for index, module in enumerate(modules):
        with torch.no_grad():
            wanted = module(x)
            assert torch.allclose(chosen.expert(index, x), wanted, atol=1e-5)
            assert torch.allclose(given.expert(index, x), wanted, atol=1e-5)


def test_the_result_of_a_layer_is_found_and_put_back() -> None:
    y, other = torch.ones(2), torch.zeros(3)
    loss = torch.tensor(0.5)
    assert result_of((None, y, loss)) is y
    assert result_of({"aux": other, "output": y}) is y
    assert result_of({"aux": 1}) is None
    new = torch.full((2,), 7.0)
    first, place, last = like((None, y, loss), new)
    assert first is None and place is new and bool(last.isnan())
    assert like({"aux": other, "y": y, "n": 3}, new) == {"aux": None, "y": new, "n": 3}


def test_every_error_has_a_hint_that_names_no_option_of_help() -> None:
    for adapt in (bank(twice), bank(tokens_first), bank(numbered)):
        with pytest.raises(MoexportError) as refused:
            loaded(adapt)
        assert refused.value.hint and "help" not in refused.value.hint
