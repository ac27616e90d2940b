"""A user's own network: its layers are found, replaced and checked against its own forward."""

from __future__ import annotations

import sys
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport import load
from moexport.data.user_code import names_code
from moexport.errors import CheckpointError, FamilyError, ParityError, UsageError
from moexport.graphs.layers.soft_moe import SoftMoE, soft_moe_layers

CODE = '''
import torch
from torch import nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.fc1 = nn.Linear(d, h)
        self.fc2 = nn.Linear(h, d)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Moe(nn.Module):
    """Dispatch over tokens and combine over slots, unless the axes are `exchanged`."""

    def __init__(self, d, n, p, exchanged=False):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(d, n, p))
        self.scale = nn.Parameter(torch.full((1,), 4.0))
        self.experts = nn.ModuleList(Expert(d, 2 * d) for _ in range(n))
        self.exchanged = exchanged

    def forward(self, x):
        x = F.normalize(x, dim=-1)
        logits = torch.einsum("bmd,dnp->bmnp", x, self.scale * F.normalize(self.phi, dim=0))
        dispatch = logits.softmax(1)
        combine = logits.flatten(2).softmax(-1).view_as(logits)
        if self.exchanged:
            dispatch, combine = combine, dispatch
        slots = torch.einsum("bmd,bmnp->bnpd", x, dispatch)
        out = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], 1)
        return torch.einsum("bnpd,bmnp->bmd", out, combine)


class Rms(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x):
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.gamma


class Experts(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))
            for _ in range(n)
        )


class SlotMoe(nn.Module):
    """Takes tokens or pixels."""

    def __init__(self, d, n, p):
        super().__init__()
        self.norm, self.slot_norm = Rms(d), Rms(d)
        self.slot_embeds = nn.Parameter(torch.randn(n, p, d))
        self.experts = Experts(d, n)

    def forward(self, x):
        pixels = x.ndim == 4
        if pixels:
            shape = x.shape
            x = x.flatten(2).transpose(1, 2)
        x = self.norm(x)
        logits = torch.einsum("bmd,npd->bmnp", x, self.slot_norm(self.slot_embeds))
        slots = torch.einsum("bmd,bmnp->bnpd", x, logits.softmax(1))
        out = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts.experts)], 1)
        y = torch.einsum("bnpd,bmnp->bmd", out, logits.flatten(2).softmax(-1).view_as(logits))
        return y.transpose(1, 2).reshape(shape) if pixels else y


class Tokens(nn.Module):
    def __init__(self, d=8, n=4, p=2, exchanged=False, surplus=False):
        super().__init__()
        self.stem = nn.Linear(3, d)
        # Registered in the other order than they are called in.
        self.late = Moe(d, n, p, exchanged)
        self.early = SlotMoe(d, n, p)
        if surplus:
            self.late.gate = nn.Linear(d, d)
        self.head = nn.Linear(d, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.early(x)
        x = x + self.late(x)
        return self.head(x.mean(1))


class WithExample(Tokens):
    def example_input(self):
        return torch.ones(1, 6, 3).cumsum(1).sin()


class Pixels(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.stem = nn.Conv2d(3, d, 3)
        self.moe = SlotMoe(d, 3, 2)

    def forward(self, x):
        return self.moe(self.stem(x)).mean((2, 3))


class TwoNames(nn.Module):
    """One layer, which it holds as `first` and as `second`."""

    def __init__(self, called):
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.first = Moe(8, 4, 2)
        self.second = self.first
        self.called = called

    def forward(self, x):
        return getattr(self, self.called)(self.stem(x)).mean(1)


def two_names(called="second"):
    torch.manual_seed(0)
    return TwoNames(called)


def package_layers():
    from moexport.tests.graphs.mumoe_layers import random_layer
    from moexport.tests.graphs.layers.test_edits import module
    from moexport.tests.graphs.lowerings.test_mumoe import spec_of
    from moexport.tests.graphs.soft_moe_layers import tiny_layer

    torch.manual_seed(0)
    soft = module(tiny_layer())  # with the spec's name `layer`, as its maker called it
    return nn.Sequential(nn.Linear(3, 6), soft, nn.Linear(6, 10), random_layer(spec_of("cp", (4,))))


def tokens(**options):
    torch.manual_seed(0)
    return Tokens(**options)


def example():
    return WithExample()


def pixels():
    torch.manual_seed(0)
    return Pixels()


def layer_alone():
    return Moe(8, 4, 2)


def half():
    return Tokens().half()


def plain():
    return nn.Linear(3, 3)


def masked():
    network = Tokens()
    layer = network.late
    network.late.forward = lambda x, mask=None: Moe.forward(layer, x)
    network.forward = lambda x: network.late(network.early(network.stem(x)), mask=None)
    return network


def holds_itself():
    network = Tokens()
    network.forward = lambda x: network.late(network.early(network.stem(x))).mean(1)
    return network


class ByClass(Tokens):
    """Looks for the class of its layers."""

    def forward(self, x):
        x = self.stem(x)
        for layer in self.children():
            if isinstance(layer, (Moe, SlotMoe)):
                x = layer(x)
        return self.head(x.mean(1))


def locked():
    import threading

    network = Tokens()
    network.lock = threading.Lock()
    return network


def fails():
    raise RuntimeError("no GPU")


def nothing():
    return None


number = 3
'''
SHAPE = {"input_shape": [6, 3]}


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynet.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mynet", "broken", "wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights that differ from the factory's initial ones."""
    import importlib

    sys.path.insert(0, str(tmp_path))
    mynet = importlib.import_module("mynet")
    torch.manual_seed(7)
    torch.save(mynet.Tokens().state_dict(), tmp_path / "w.pt")
    return tmp_path / "w.pt"


def test_a_factory_is_told_from_a_path(tmp_path: Path) -> None:
    assert names_code("mynet:tokens")
    assert names_code("my.pack_age.net:Class.build")
    assert not names_code("weights.pt")
    assert not names_code("/data/weights.pt")
    assert not names_code("C:\\weights.pt")
    (tmp_path / "odd:name").write_text("")
    assert not names_code("odd:name")


def test_layers_are_found_replaced_and_listed_in_the_order_of_their_calls() -> None:
    model = load("mynet:tokens", config=SHAPE)
    assert list(model.layers) == ["early", "late"]
    assert [layer.spec.name for layer in model.layers.values()] == ["early", "late"]
    assert soft_moe_layers(model.module)["early"].spec.norm == "l2"
    replaced = [note for note in model.notes if "replaced as" in note]
    assert [note.split()[0] for note in replaced] == ["early", "late"]


def test_the_replaced_network_computes_what_the_users_does() -> None:
    model = load("mynet:tokens", config=SHAPE)
    assert model.original is not None
    x = torch.randn(4, 6, 3)
    assert torch.allclose(model.module(x), model.original(x), atol=1e-5)
    assert type(model.original.late).__name__ == "Moe"


def test_both_networks_share_their_tensors() -> None:
    model = load("mynet:tokens", config=SHAPE)
    assert model.original is not None
    stem = "stem.weight"
    assert model.module.get_parameter(stem) is model.original.get_parameter(stem)
    own = {p.untyped_storage().data_ptr() for p in model.original.parameters()}
    for layer in model.layers.values():
        for name, matrix in layer.named_parameters():
            if name.startswith(("w1", "w2")):
                assert matrix.untyped_storage().data_ptr() in own


def test_input_and_output_are_told_by_the_example() -> None:
    model = load("mynet:tokens", config=SHAPE)
    assert model.input.shape == ("batch", 6, 3)
    assert model.output.shape == ("batch", 5)
    assert model.example is not None
    assert model.config == SHAPE


def test_the_networks_own_example_is_used_and_a_given_one_comes_first() -> None:
    assert load("mynet:example").input.shape == ("batch", 6, 3)
    given = np.random.default_rng(0).standard_normal((3, 9, 3))
    model = load("mynet:example", example=given)
    assert model.input.shape == ("batch", 9, 3)
    assert model.input.dtype == "float32"


def test_without_an_example_the_ways_to_give_one_are_shown() -> None:
    for config in ({}, {"input_shape": "big"}, {"input_shape": [0, 3]}):
        with pytest.raises(UsageError, match="no input") as caught:
            load("mynet:tokens", config=config)
        assert 'config={"input_shape": [3, 224, 224]}' in str(caught.value.hint)


def test_layers_on_pixels_are_replaced_too() -> None:
    model = load("mynet:pixels", config={"input_shape": [3, 9, 7]})
    assert list(model.layers) == ["moe.layer"]
    assert model.layers["moe.layer"].spec.name == "moe.layer"


@pytest.mark.parametrize("called", ["first", "second"])
def test_a_layer_under_two_names_is_one_layer(called: str, tmp_path: Path) -> None:
    model = load("mynet:two_names", config=SHAPE | {"called": called})
    assert list(model.layers) == ["first"]
    bundle = moexport.export(model, tmp_path / "out", k=2)
    assert [layer.name for layer in bundle.manifest.layers] == ["first"]
    assert isinstance(getattr(model.module, called), SoftMoE)  # tracing did not move it


def test_layers_of_the_package_in_a_users_network_are_found(tmp_path: Path) -> None:
    model = load("mynet:package_layers", config=SHAPE)
    assert list(model.layers) == ["1", "3"]
    assert [layer.spec.name for layer in model.layers.values()] == ["1", "3"]
    assert model.original is not None
    own, ours = (dict(m.named_parameters()) for m in (model.original, model.module))
    assert own["1.w1"].data_ptr() == ours["1.w1"].data_ptr()
    bundle = moexport.export(model, tmp_path / "out", k=2)
    assert [layer.kind for layer in bundle.manifest.layers] == ["soft-moe", "mumoe"]


def test_a_network_that_is_a_layer_is_named(tmp_path: Path) -> None:
    model = load("mynet:layer_alone", config={"input_shape": [6, 8]})
    assert list(model.layers) == ["layer"]


def test_a_half_precision_network_is_converted_with_a_note() -> None:
    model = load("mynet:half", config=SHAPE)
    assert any("float32" in note for note in model.notes)
    assert model.module(torch.randn(2, 6, 3)).dtype == torch.float32


# --- weights -----------------------------------------------------------------------------------


def test_weights_are_put_into_the_network(weights: Path) -> None:
    model = load("mynet:tokens", config=SHAPE, weights=weights)
    saved = torch.load(weights, weights_only=True)
    assert torch.equal(model.module.get_parameter("stem.weight"), saved["stem.weight"])
    early = soft_moe_layers(model.module)["early"]
    assert torch.equal(early.w1[0].T, saved["early.experts.experts.0.0.weight"])
    assert model.source.files == (weights,)
    assert model.source.path == "mynet:tokens"


def test_prefixes_of_training_wrappers_are_no_obstacle(weights: Path) -> None:
    state = torch.load(weights, weights_only=True)
    torch.save({"state_dict": {f"model.{k}": t for k, t in state.items()}}, weights)
    model = load("mynet:tokens", config=SHAPE, weights=weights)
    assert torch.equal(model.module.get_parameter("stem.weight"), state["stem.weight"])


def test_a_prefix_that_is_the_networks_own_name_is_put_back(tmp_path: Path) -> None:
    code = "from mynet import *\nclass Outer(nn.Module):\n    def __init__(self):\n"
    code += "        super().__init__()\n        self.model = Tokens()\n"
    code += "    def forward(self, x):\n        return self.model(x)\n"
    (tmp_path / "outer.py").write_text(code)
    first = load("outer:Outer", config=SHAPE)
    assert first.original is not None
    torch.save({f"module.{k}": t for k, t in first.original.state_dict().items()}, "w.pt")
    again = load("outer:Outer", config=SHAPE, weights="w.pt")
    x = torch.randn(2, 6, 3)
    assert torch.equal(first.module(x), again.module(x))
    del sys.modules["outer"]


def test_weights_of_another_network_are_refused_with_their_keys(weights: Path) -> None:
    state = torch.load(weights, weights_only=True)
    state["surplus"] = state.pop("head.bias")
    torch.save(state, weights)
    with pytest.raises(CheckpointError, match=r"missing head\.bias; unexpected surplus"):
        load("mynet:tokens", config=SHAPE, weights=weights)


def test_weights_of_another_size_name_both_shapes(weights: Path) -> None:
    with pytest.raises(CheckpointError, match=r"stem\.weight has shape \[8, 3\], expected \[9, 3"):
        load("mynet:tokens", config={"d": 9, **SHAPE}, weights=weights)


def test_integers_where_a_network_has_floats_are_named(weights: Path) -> None:
    state = torch.load(weights, weights_only=True)
    torch.save({**state, "stem.weight": torch.ones(8, 3, dtype=torch.int8)}, weights)
    with pytest.raises(CheckpointError, match=r"stem\.weight contains integers \(int8\)"):
        load("mynet:tokens", config=SHAPE, weights=weights)


def test_nan_in_a_networks_own_parameters_is_named(tmp_path: Path) -> None:
    code = "from mynet import *\ndef diverged():\n    network = Tokens()\n"
    code += "    network.head.weight.data[0, 0] = float('nan')\n    return network\n"
    (tmp_path / "diverged.py").write_text(code)
    with pytest.raises(CheckpointError, match=r"diverged:diverged: head\.weight contains NaN"):
        load("diverged:diverged", config=SHAPE)
    del sys.modules["diverged"]


def test_weights_beside_a_checkpoint_are_a_mistake(weights: Path) -> None:
    with pytest.raises(UsageError, match="weights="):
        load(weights, weights=weights)


# --- what cannot be replaced -------------------------------------------------------------------


def test_a_layer_with_exchanged_axes_fails_and_is_named() -> None:
    with pytest.raises(ParityError, match="the layer late computes something different"):
        load("mynet:tokens", config={"exchanged": True, **SHAPE})


def test_a_layer_with_more_parameters_is_named() -> None:
    with pytest.raises(FamilyError, match=r"late resembles .*late\.gate\.weight"):
        load("mynet:tokens", config={"surplus": True, **SHAPE})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain", "has no Soft MoE or muMoE layer"),
        ("masked", "more than its tokens"),
        ("holds_itself", "does not call the replacement of the layer early"),
        ("ByClass", "does not call the replacement of the layer late"),
        ("locked", "cannot be copied"),
    ],
)
def test_networks_that_cannot_be_replaced_say_why(name: str, words: str) -> None:
    with pytest.raises(FamilyError, match=words):
        load(f"mynet:{name}", config={"input_shape": [6, 3]})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere:tokens", "no module named nowhere"),
        ("mynet.sub:tokens", "no module named mynet"),
        ("broken:tokens", "a_package_that_is_not_there"),
        ("wrong:tokens", "ZeroDivisionError"),
        ("mynet:absent", "has no absent"),
        ("mynet:number", "not callable"),
        ("mynet:fails", "RuntimeError: no GPU"),
        ("mynet:nothing", "returned a NoneType"),
    ],
)
def test_a_factory_that_does_not_work_is_told_from_one_that_is_not_there(
    source: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        load(source, config=SHAPE)


def test_an_example_that_does_not_fit_shows_what_the_network_says() -> None:
    with pytest.raises(UsageError, match=r"its forward failed on an input of shape \[2, 6, 4\]"):
        load("mynet:tokens", config={"input_shape": [6, 4]})


def test_wrong_arguments_show_the_call() -> None:
    with pytest.raises(UsageError, match=r"mynet:tokens\(width=3\) failed: TypeError"):
        load("mynet:tokens", config={"width": 3, **SHAPE})


def test_a_family_beside_a_factory_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="family="):
        load("mynet:tokens", family="soft-moe-vit", config=SHAPE)
