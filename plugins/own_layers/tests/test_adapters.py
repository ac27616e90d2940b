"""A user's layers with adapters end in a verified bundle or in a clear error."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport import load
from moexport.bench.plan import Candidate
from moexport.bench.runners.models import loaders
from moexport.errors import FamilyError, FeedError, ParityError, UsageError
from moexport.plugins.own_layers.adapters import adapts
from moexport.plugins.own_layers.request import NetworkOptions
from moexport.tests.command import Outcome, run
from torch import nn

CODE = '''
import moexport
import torch
from torch import nn
from torch.nn import functional as F

NORMS = {
    "none": lambda x, eps: x,
    "l2": lambda x, eps: x / x.norm(dim=-1, keepdim=True).clamp_min(eps),
    "l2-plus": lambda x, eps: x / (x.norm(dim=-1, keepdim=True) + eps),
    "l2-rsqrt": lambda x, eps: x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt(),
    "layernorm": lambda x, eps: (x - x.mean(-1, keepdim=True))
    / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt(),
}
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Mixer(nn.Module):
    """A Soft MoE layer whose parameters have names that no published code has."""

    def __init__(self, d=8, n=4, p=1, h=12, o=None, kind="mlp", norm="l2", eps=0.03,
                 slots_from="normalised", activation="gelu", bias=True, gain=False,
                 residual=False, swapped=False):
        super().__init__()
        inner = {"mlp": h, "geglu": 2 * h, "linear": o or d}[kind]
        self.queries = nn.Parameter(torch.randn(n, p, d))
        self.sharpness = nn.Parameter(torch.tensor(2.0))
        self.enter = nn.ModuleList(nn.Linear(d, inner, bias) for _ in range(n))
        self.leave = nn.ModuleList(nn.Linear(h, o or d, bias) for _ in range(n))
        if kind == "linear":
            self.leave = None
        self.g = nn.Parameter(torch.rand(d) + 0.5) if gain else None
        self.s = nn.Parameter(torch.randn(d)) if gain and norm == "layernorm" else None
        self.kind, self.norm, self.eps, self.slots_from = kind, norm, eps, slots_from
        self.activation, self.residual, self.swapped = activation, residual, swapped

    def expert(self, i, x):
        x = self.enter[i](x)
        if self.kind == "linear":
            return x
        if self.kind == "geglu":
            gate, value = x.chunk(2, -1)
            return self.leave[i](value * F.gelu(gate))
        return self.leave[i](ACTIVATIONS[self.activation](x))

    def forward(self, x):
        pixels = x.ndim == 4
        if pixels:
            size = x.shape[2:]
            x = x.flatten(2).transpose(1, 2)
        seen = NORMS[self.norm](x, self.eps)
        seen = seen if self.g is None else seen * self.g
        seen = seen if self.s is None else seen + self.s
        logits = torch.einsum("bmd,npd->bmnp", seen, self.sharpness * self.queries)
        dispatch, combine = logits.softmax(1), logits.flatten(2).softmax(2).view_as(logits)
        if self.swapped:
            dispatch, combine = combine, dispatch
        slots = torch.einsum(
            "bmnp,bmd->bnpd", dispatch, x if self.slots_from == "raw" else seen
        )
        out = torch.stack([self.expert(i, slots[:, i]) for i in range(len(self.enter))], 1)
        y = torch.einsum("bmnp,bnpo->bmo", combine, out)
        y = y + x if self.residual else y
        return y.transpose(1, 2).unflatten(2, size) if pixels else y


def options(layer):
    phi = (layer.sharpness * layer.queries).permute(2, 0, 1)
    return dict(phi=phi, norm=layer.norm, eps=layer.eps if layer.norm != "none" else None,
                gain=layer.g, shift=layer.s, slots_from=layer.slots_from,
                activation=None if layer.kind == "linear" else layer.activation,
                gate="concatenated" if layer.kind == "geglu" else None)


def experts(layer):
    return list(layer.enter) if layer.leave is None else list(zip(layer.enter, layer.leave))


def adapt(layer: Mixer) -> moexport.SoftMoE:
    return moexport.SoftMoE(experts=experts(layer), **options(layer))


def stacked(layer: Mixer) -> moexport.SoftMoE:
    def all_of(maps, what):
        if maps is None or maps[0].bias is None and what == "bias":
            return None
        each = [getattr(a, what) for a in maps]
        return torch.stack([e.T if e.ndim == 2 else e for e in each])

    return moexport.SoftMoE(
        w1=all_of(layer.enter, "weight"), b1=all_of(layer.enter, "bias"),
        w2=all_of(layer.leave, "weight"), b2=all_of(layer.leave, "bias"), **options(layer))


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)


class Lookalike(nn.Module):
    """The names of a published layer, but slots of raw tokens."""

    def __init__(self):
        super().__init__()
        self.phi, self.scale = nn.Parameter(torch.randn(8, 4, 2)), nn.Parameter(torch.ones(1))
        self.experts = nn.ModuleList(Half() for _ in range(4))

    def forward(self, x):
        logits = torch.einsum("bmd,dnp->bmnp", F.normalize(x, dim=-1), router(self))
        slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), x)
        out = [e.fc2(F.gelu(e.fc1(slots[:, i]))) for i, e in enumerate(self.experts)]
        combine = logits.flatten(2).softmax(2).view_as(logits)
        return torch.einsum("bmnp,bnpd->bmd", combine, torch.stack(out, 1))


def router(layer):
    return layer.scale * F.normalize(layer.phi, dim=0)


def lookalike():
    return seeded(lambda: Net(Lookalike()))


def of_lookalike(layer: Lookalike):
    return moexport.SoftMoE(phi=router(layer), experts=[(e.fc1, e.fc2) for e in layer.experts],
                            norm="l2", slots_from="raw")


class Net(nn.Module):
    def __init__(self, layer, d=8, residual=True):
        super().__init__()
        self.stem, self.mix, self.head = nn.Linear(3, d), layer, nn.LazyLinear(5)
        self.residual = residual

    def forward(self, x):
        x = self.stem(x)
        y = self.mix(x)
        return self.head((x + y if self.residual else y).mean(1))


def seeded(make, *rest):
    torch.manual_seed(0)
    net = make(*rest)
    net(torch.zeros(1, 6, 3))
    return net


def soft(**given):
    return seeded(lambda: Net(Mixer(**given), residual="o" not in given))


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 8, 1), Mixer()

    def forward(self, x):
        return self.mix(self.stem(x)).mean((2, 3))


def pixels():
    torch.manual_seed(0)
    return Pixels()


def plain():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 3)))


class Tensors(nn.Module):
    """A muMoE layer in four forms, each made into its whole weight tensor first."""

    def __init__(self, form="cp", levels=(4,), d=8, o=8, act="softmax", norm="none", bias=True,
                 flat=False, second=False):
        super().__init__()
        self.gate = nn.ModuleList(nn.Linear(d, n, bias=norm != "ln") for n in levels)
        modes, r = (*levels, d + bias, o), 3
        if form == "cp":
            shapes = [(size, r) for size in modes]
        elif form == "tr":
            ring = [2, *range(3, 2 + len(modes)), 2]
            shapes = [(ring[i], size, ring[i + 1]) for i, size in enumerate(modes)]
        elif form == "tucker":
            shapes = [(r,) * len(modes), *((size, r) for size in modes)]
        else:
            shapes = [modes]
        self.parts = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.more = nn.ParameterList(torch.randn(shape) for shape in shapes) if second else None
        self.bn = nn.ModuleList(nn.BatchNorm1d(n, eps=1e-3) for n in levels)
        for each in self.bn:
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2)
            each.weight.data.normal_()
            each.bias.data.normal_()
        self.form, self.act, self.norm, self.flat = form, act, norm, flat

    def whole(self, parts):
        if self.form == "full":
            return parts[0]
        letters = "abcdefg"[: len(parts) - (self.form == "tucker")]
        if self.form == "cp":
            return torch.einsum(",".join(f"{c}z" for c in letters) + f"->{letters}", *parts)
        if self.form == "tucker":
            core = letters.upper()
            terms = ",".join(f"{c}{c.upper()}" for c in letters)
            return torch.einsum(f"{core},{terms}->{letters}", *parts)
        ring = "rstuvw"[: len(letters)]
        terms = ",".join(f"{ring[i]}{c}{(ring[1:] + 'r')[i]}" for i, c in enumerate(letters))
        return torch.einsum(f"{terms}->{letters}", *parts)

    def apply_to(self, parts, gates, x):
        weight = self.whole(parts)
        if weight.shape[-2] > x.shape[-1]:
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        rows = x.reshape(-1, x.shape[-1])
        out = []
        for t in range(len(rows)):
            w = weight
            for gate in gates:
                w = torch.tensordot(gate.reshape(len(rows), -1)[t], w, 1)
            out.append(rows[t] @ w)
        return torch.stack(out).view(*x.shape[:-1], -1)

    def forward(self, x):
        x = x.mean(1) if self.flat else x
        gates = []
        for gate, bn in zip(self.gate, self.bn):
            logits = gate(x)
            if self.norm == "bn":
                logits = bn(logits.reshape(-1, logits.shape[-1])).view_as(logits)
            if self.norm == "ln":
                logits = F.layer_norm(logits, logits.shape[-1:])
            gates.append(logits.softmax(-1) if self.act == "softmax" else sparsemax(logits))
        y = self.apply_to(self.parts, gates, x)
        return y if self.more is None else self.apply_to(self.more, gates, F.gelu(y))


class Flat(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.stem, self.mix = nn.Linear(3, 8), layer

    def forward(self, x):
        return self.mix(self.stem(x).mean(1))


def sparsemax(z):
    s = z.sort(-1, descending=True).values
    c = s.cumsum(-1) - 1
    k = torch.arange(1, z.shape[-1] + 1)
    n = (s * k > c).sum(-1, keepdim=True)
    return (z - c.gather(-1, n - 1) / n).clamp_min(0)


def mumoe(**given):
    torch.manual_seed(0)
    if given.pop("vectors", False):
        return Flat(Tensors(**given))
    return seeded(lambda: Net(Tensors(**given)))


def described(layer: Tensors) -> moexport.MuMoE:
    def form(parts):
        if parts is None:
            return None
        parts = list(parts)
        return {"full": parts[0], "tucker": (parts[0], parts[1:])}.get(layer.form, parts)

    return moexport.MuMoE(
        gates=list(layer.gate), weights=form(layer.parts), second=form(layer.more),
        norm=list(layer.bn) if layer.norm == "bn" else layer.norm, activation=layer.act)


# Wrong ones.

def with_changes(**changes):
    def changed(layer: Mixer):
        return moexport.SoftMoE(**{**options(layer), "experts": experts(layer), **changes})
    return changed


wrong_norm = with_changes(norm="none", eps=None)
wrong_two = with_changes(norm="none", eps=None, activation="relu")
wrong_tanh = with_changes(activation="gelu-tanh")
wrong_slots = with_changes(slots_from="raw")
raises = lambda layer: layer.nothing_of_that_name  # noqa: E731
raises.__annotations__ = {"layer": Mixer}


def unscaled(layer: Mixer):
    return moexport.SoftMoE(experts=experts(layer),
                            **{**options(layer), "phi": layer.queries.permute(2, 0, 1)})


def inverted(layer: Mixer):
    return moexport.SoftMoE(experts=experts(layer),
                            **{**options(layer), "phi": -options(layer)["phi"]})


def exchanged(layer: Mixer):
    maps = [(*each.weight.chunk(2)[::-1], last.weight)
            for each, last in zip(layer.enter, layer.leave)]
    biased = [((up, each.bias[12:]), (gate, each.bias[:12]), (last, lower.bias))
              for (up, gate, last), each, lower in zip(maps, layer.enter, layer.leave)]
    return moexport.SoftMoE(experts=biased, **{**options(layer), "gate": None})


def turned(layer: Mixer):
    maps = [((a.weight.T, a.bias), b) for a, b in zip(layer.enter, layer.leave)]
    return moexport.SoftMoE(experts=maps, **options(layer))


def random(layer: Mixer):
    if "forward" not in vars(layer):
        given = layer.forward
        layer.forward = lambda x: given(x) + torch.randn_like(x)
    return adapt(layer)


def not_transposed(layer: Mixer):
    return moexport.SoftMoE(experts=experts(layer), **{**options(layer), "phi": layer.queries})


def returns_a_dict(layer: Mixer):
    return options(layer)


def without_a_class(layer):
    return adapt(layer)


def of_any_module(layer: nn.Module):
    return adapt(layer)


def for_tensors(layer: Tensors):
    return described(layer)


def wrong_gate(layer: Tensors):
    return moexport.MuMoE(gates=list(layer.gate), weights=list(layer.parts), norm="none",
                          activation="sparsemax")


number = 3
'''

FEED = "inputs.npz"


@pytest.fixture(autouse=True)
def in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("adapt = 1 / 0\n")
    x = np.random.default_rng(0).standard_normal((12, 6, 3)).astype(np.float32)
    np.savez(tmp_path / FEED, input=x, label=np.arange(12) % 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own", "decorated", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def sets(options: dict[str, Any]) -> list[str]:
    return [text for key, value in options.items() for text in ("--set", f"{key}={value}")]


def exported(factory: str, adapter: str, options: dict[str, Any], *more: str) -> Outcome:
    outcome = run(
        *("export", f"own:{factory}", "--adapter", f"own:{adapter}", "--data", FEED),
        *("-o", "out", "--no-engine", *sets(options), *more),
    )
    return outcome if outcome.code else run("verify", "out")


# --- every kind of layer, through the command line to a verified bundle --------------------------

SOFT: list[dict[str, Any]] = [
    {},
    {"norm": "none", "bias": "false", "activation": "relu", "p": 3},
    {"norm": "l2-plus", "slots_from": "raw", "activation": "gelu-tanh"},
    {"norm": "l2-rsqrt", "gain": "true", "p": 2, "o": 10},
    {"norm": "layernorm", "gain": "true"},
    {"norm": "layernorm", "slots_from": "raw", "gain": "true", "p": 2},
    {"kind": "geglu", "slots_from": "raw"},
    {"kind": "linear", "norm": "none", "o": 7, "p": 2},
]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values()) or "default"


@pytest.mark.parametrize("adapter", ["adapt", "stacked"])
@pytest.mark.parametrize("options", SOFT, ids=name_of)
def test_a_soft_moe_layer_of_ones_own_becomes_a_verified_bundle(
    options: dict[str, Any], adapter: str
) -> None:
    if adapter == "stacked" and "kind" not in options and options:
        pytest.skip("the same arithmetic as in pairs")
    outcome = exported("soft", adapter, options, "--k", "2")
    assert outcome.code == 0, outcome.err
    assert re.search(r"same experts in (\d+) of \1 inputs", outcome.out)


MUMOE: list[dict[str, Any]] = [
    {"form": "cp", "levels": "[4,2]", "norm": "bn"},
    {"form": "tr", "norm": "ln", "act": "sparsemax"},
    {"form": "tr", "levels": "[3,2]", "bias": "false"},
    {"form": "tucker", "norm": "bn", "act": "sparsemax"},
    {"form": "full", "second": "true"},
    {"form": "cp", "vectors": "true"},
]


@pytest.mark.parametrize("options", MUMOE, ids=name_of)
def test_a_mumoe_layer_of_ones_own_becomes_a_verified_bundle(options: dict[str, Any]) -> None:
    outcome = exported("mumoe", "described", options, "--k", "2")
    assert outcome.code == 0, outcome.err


def test_pixels_are_tokens(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 5, 2)).astype(np.float32)
    np.savez(FEED, input=x)
    assert exported("pixels", "adapt", {}).code == 0


def test_an_adapter_is_picked_up_when_its_module_is_imported() -> None:
    code = "import own, moexport\nbuild = own.soft\n"
    Path("decorated.py").write_text(f"{code}moexport.adapts(own.Mixer)(own.adapt)\n")
    assert run("inspect", "decorated:build", "--data", FEED).code == 0
    model = load("decorated:build", example=FEED)
    assert model.source.further == (NetworkOptions(adapter=("own:adapt",)),)
    assert "mix replaced as described by the adapter own:adapt" in model.notes
    assert list(model.layers) == ["mix"]


def test_an_adapter_serves_subclasses_that_have_none_of_their_own() -> None:
    Path("decorated.py").write_text(
        "import own\nclass Nearer(own.Mixer): pass\n"
        "def build(): return own.seeded(lambda: own.Net(Nearer()))\n"
    )
    assert run("inspect", "decorated:build", "--data", FEED, "--adapter", "own:adapt").code == 0


def test_python_takes_the_function_itself_and_shares_its_weights(tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    import own  # type: ignore[import-not-found]

    model = load("own:soft", example=FEED, adapter=own.adapt)
    assert model.original is not None
    own_memory = {p.untyped_storage().data_ptr() for p in model.original.parameters()}
    matrices = [t for name, t in model.module.named_parameters() if name.startswith("mix.w")]
    assert len(matrices) == 8
    assert {m.untyped_storage().data_ptr() for m in matrices} <= own_memory
    assert moexport.export(model, "out", k=2).verify()


def test_a_benchmark_opens_the_layer_in_another_process_too() -> None:
    model = load("own:soft", example=FEED, adapter="own:adapt")
    for loader in loaders(
        Candidate("own", model, (2,), (), engines=("pytorch-algorithm-2",))
    ).values():
        assert pickle.loads(pickle.dumps(loader))() is not None
    adapt = vars(sys.modules["own"])["adapt"]
    assert load("own:soft", example=FEED, adapter=adapt).source.loads_elsewhere
    adapt.__module__ = "__main__"  # as in a notebook
    here = load("own:soft", example=FEED, adapter=adapt)
    loader, *_ = loaders(Candidate("own", here, (2,), ())).values()
    with pytest.raises(TypeError, match="another process"):
        pickle.dumps(loader)


# --- --data is the example in every command ------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["export", "-o", "out", "--dry-run"],
        ["calibrate", "-o", "table.json"],
        ["specialise"],
    ],
    ids=lambda command: command[0],
)
def test_data_is_the_example_of_a_factorys_network(command: list[str]) -> None:
    name, *more = command
    outcome = run(name, "own:soft", "--adapter", "own:adapt", "--data", FEED, *more)
    assert outcome.code == 0, outcome.err


def test_inspect_shows_no_line_without_contents() -> None:
    outcome = run("inspect", "own:soft", "--adapter", "own:adapt", "--data", FEED)
    assert outcome.out.startswith("family      factory\ninput ")


def test_data_that_cannot_be_the_example_says_so() -> None:
    with pytest.raises(FeedError, match="no such feed"):
        load("own:soft", example="absent.npz", adapter="own:adapt")
    np.savez("wide.npz", input=np.zeros((2, 6, 4), np.float32))
    with pytest.raises(UsageError, match=r"failed on an input of shape \[2, 6, 4\]"):
        load("own:soft", example="wide.npz", adapter="own:adapt")


# --- what does not match -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "options", "says"),
    [
        ("wrong_norm", {"eps": 1e-12}, "it matches with norm='l2'$"),
        ("wrong_two", {"eps": 1e-12}, "it matches with norm='l2', activation='gelu'$"),
        ("wrong_slots", {}, "it matches with slots_from='normalised'$"),
        ("adapt", {"residual": True}, "once x is subtracted from y: the layer adds its input$"),
        ("unscaled", {}, r"it matches with temperature=1 / layer\.sharpness$"),
        ("exchanged", {"kind": "geglu"}, "it matches with gate and up exchanged$"),
        ("turned", {"h": 8}, "it matches with the first weight transposed$"),
        ("adapt", {"swapped": True}, "the softmax of dispatch over all slots, of combine over"),
        ("random", {}, "returns a different result each time it is called, even in eval mode$"),
        ("inverted", {}, "none of [0-9]+ combinations of options matches"),
    ],
)
def test_a_mismatch_says_which_options_match_or_how_far_off_each_is(
    adapter: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ParityError, match=says) as caught:
        load("own:soft", config=options, example=FEED, adapter=f"own:{adapter}")
    if adapter != "random":
        assert "own:soft: the layer mix does not match its adapter" in caught.value.message
    if adapter == "inverted":
        assert "activation='identity': " in caught.value.message
        assert "normalised and scaled" in str(caught.value.hint)


def test_an_approximation_within_the_tolerance_is_no_match_where_another_option_is_exact() -> None:
    with np.load(FEED) as arrays:
        small = arrays["input"] / 3
    config = {"norm": "none", "bias": False}
    with pytest.raises(ParityError, match=r"it matches with activation='gelu'$") as caught:
        load("own:soft", config=config, example=small, adapter="own:wrong_tanh")
    assert "off by 4e-05 of max" in caught.value.message
    load("own:soft", config=config, example=small, adapter="own:adapt")


def test_an_adapter_is_asked_before_the_names_of_parameters() -> None:
    with pytest.raises(ParityError, match="published layer that its parameters resemble") as caught:
        load("own:lookalike", example=FEED)
    assert "@moexport.adapts(Lookalike)" in str(caught.value.hint)
    assert exported("lookalike", "of_lookalike", {}, "--k", "2").code == 0


def test_a_mumoe_that_differs_says_what_matches() -> None:
    for norm, says in {"none": "", "ln": "norm='ln', "}.items():
        with pytest.raises(ParityError, match=f"it matches with {says}activation='softmax'$"):
            load("own:mumoe", example=FEED, adapter="own:wrong_gate", config={"norm": norm})


# --- bad adapters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "says", "hint"),
    [
        (
            "own:raises",
            "own:<lambda> for the layer mix: AttributeError: .*nothing_of",
            "the traceback",
        ),
        ("own:not_transposed", r"but phi \[4, 1, 8\] is for d = 4", "is transposed"),
        ("own:returns_a_dict", "the layer mix: it returned a dict", "moexport.SoftMoE"),
        ("own:without_a_class", "does not name the layer class", "def adapt"),
        ("own:of_any_module", "does not name the layer class", "adapts"),
        ("own:for_tensors", "is for Tensors, but Net has no such layer", "Net, Mixer"),
        ("own:absent", "own has no absent", None),
        ("own:number", "number is a int, not callable", None),
        ("nowhere:adapt", "no module named nowhere", "run from the folder"),
        ("broken:adapt", "importing broken failed: ZeroDivisionError", None),
        ("adapt", "adapt: not the name of an adapter", "package.module:function"),
    ],
)
def test_an_adapter_that_cannot_be_used_says_why(adapter: str, says: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        load("own:soft", example=FEED, adapter=adapter)
    assert hint is None or hint in str(caught.value.hint)
    outcome = run("inspect", "own:soft", "--data", FEED, "--adapter", adapter)
    assert outcome.code == 2
    assert outcome.error == caught.value.message


def test_two_adapters_of_a_class_are_refused() -> None:
    with pytest.raises(UsageError, match="Mixer has two adapters: own:adapt and own:stacked"):
        load("own:soft", example=FEED, adapter=["own:adapt", "own:stacked"])
    Path("decorated.py").write_text(
        "import own, moexport\nmoexport.adapts(own.Mixer)(own.adapt)\n"
        "moexport.adapts(own.Mixer)(own.stacked)\n"
    )
    with pytest.raises(UsageError, match="Mixer has two adapters"):
        load("decorated:build")


def test_an_adapter_beside_a_checkpoint_is_a_mistake(tmp_path: Path) -> None:
    torch.save({}, "w.pt")
    with pytest.raises(UsageError, match="adapter=… describes the layers of a network"):
        load("w.pt", adapter="own:adapt")


def test_what_is_no_class_of_layers_is_refused() -> None:
    for wrong in (nn.Module, nn.Linear(2, 2), int):
        with pytest.raises(UsageError, match="not a layer class"):
            adapts(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("factory", ["soft", "plain"])
def test_a_network_without_a_known_layer_names_the_way(factory: str) -> None:
    with pytest.raises(FamilyError, match="has no Soft MoE or muMoE layer") as caught:
        load(f"own:{factory}", example=FEED)
    name = "Mixer" if factory == "soft" else "MyLayer"
    assert f"@moexport.adapts({name})" in str(caught.value.hint)
    assert "moexport.SoftMoE(phi=" in str(caught.value.hint)
    assert "docs/own-layer.md" in str(caught.value.hint)
    assert ('`moexport.adapt("own:Mixer")` writes a' in str(caught.value.hint)) == (
        factory == "soft"
    )


# --- tensors that do not fit ---------------------------------------------------------------------

D, N, H, OUT = 6, 4, 10, 5
PHI = torch.randn(D, N, 2)


def pairs(h: int = H, d: int = D, o: int = OUT, n: int = N) -> list[tuple[nn.Linear, nn.Linear]]:
    return [(nn.Linear(d, h), nn.Linear(h, o)) for _ in range(n)]


def test_the_forms_of_experts_are_one_layer() -> None:
    experts = pairs()
    layer = moexport.SoftMoE(phi=PHI, experts=experts).build("a")
    weights = [((u.weight, u.bias), (w.weight, w.bias)) for u, w in experts]
    convolved = []
    for u, w in experts:
        convolution = nn.Conv2d(D, H, 1)
        convolution.weight.data, convolution.bias = u.weight.data[:, :, None, None], u.bias
        convolved.append((convolution, w))
    x = torch.randn(2, 7, D)
    for given in (weights, convolved):
        assert torch.equal(moexport.SoftMoE(phi=PHI, experts=given).build("b")(x), layer(x))
    assert layer.spec.name == "a"
    assert (layer.spec.slots, layer.spec.hidden, layer.spec.out) == (2, H, OUT)


def test_a_geglu_is_two_maps_or_one_of_both() -> None:
    three = [(nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, OUT)) for _ in range(N)]
    joined = [
        ((torch.cat([g.weight, u.weight]), torch.cat([g.bias, u.bias])), last)
        for g, u, last in three
    ]
    x = torch.randn(2, 7, D)
    one = moexport.SoftMoE(phi=PHI, experts=three).build("")
    other = moexport.SoftMoE(phi=PHI, experts=joined, gate="concatenated").build("")
    assert one.spec.expert == "gated"
    assert torch.equal(one(x), other(x))


class OneGatedMap(nn.Module):
    """silu(a) * b of the halves of one map."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, 2 * OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.fc(x).chunk(2, -1)
        y: torch.Tensor = nn.functional.silu(a) * b
        return y


def test_a_gated_expert_of_one_map_is_refused() -> None:
    layer = moexport.SoftMoE(phi=PHI, experts=[OneGatedMap() for _ in range(N)])
    with pytest.raises(UsageError, match="gate='concatenated' needs two maps"):
        layer.build("")


def test_lists_of_pytorchs_own_kinds_are_lists() -> None:
    experts = pairs()
    x = torch.randn(2, 7, D)
    of_lists = nn.ModuleList(nn.ModuleList(pair) for pair in experts)
    one = moexport.SoftMoE(phi=PHI, experts=of_lists).build("")
    assert torch.equal(one(x), moexport.SoftMoE(phi=PHI, experts=experts).build("")(x))
    gate, norm, factors = nn.Linear(D, N), nn.BatchNorm1d(N), nn.ParameterList(CP)
    norms = nn.ModuleList([norm])
    layer = moexport.MuMoE(gates=nn.ModuleList([gate]), weights=factors, norm=norms).build("")
    other = moexport.MuMoE(gates=[gate], weights=CP, norm=[norm]).build("")
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("module", [nn.LayerNorm(D, eps=1e-3), nn.RMSNorm(D, eps=1e-2)])
def test_a_normalisation_layer_says_its_kind_and_eps(module: nn.Module) -> None:
    torch.manual_seed(0)
    for each in module.parameters():
        each.data.normal_()
    layer = moexport.SoftMoE(phi=PHI, experts=pairs(), norm=module).build("")
    x = torch.randn(2, 7, D)
    assert torch.allclose(layer.normalise(x), module(x), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"phi": PHI[0, 0]}, r"phi has the shape \[2\], expected \[d, n, p\]"),
        ({"phi": None}, "phi is a NoneType, not a tensor"),
        ({"experts": pairs(n=3)}, "experts has 3 entries, but phi .* is for n = 4"),
        ({"experts": pairs(d=7)}, r"experts\[0\]: its first weight has the shape \[10, 7\]"),
        ({"experts": [*pairs(n=3), *pairs(h=9, n=1)]}, r"experts\[3\]: its first weight"),
        ({"experts": [*pairs(n=3), *pairs(o=9, n=1)]}, r"experts\[3\]: its last weight"),
        ({"experts": [nn.Sequential()] * N}, r"experts\[0\] \(Sequential\): .* an expert's output"),
        ({"experts": [(nn.Linear(D, H), nn.ReLU())] * N}, r"experts\[0\]\[1\] is a ReLU"),
        ({"experts": [*pairs(n=3), nn.Linear(D, OUT)]}, "some experts have 1 maps and others 2"),
        ({"experts": [(nn.Linear(D, 2 * H), nn.Linear(H, OUT))] * N}, "returns 20 numbers after"),
        ({"experts": pairs(), "w1": PHI}, "given twice"),
        ({"experts": None}, "no experts are given"),
        ({"experts": None, "w1": torch.zeros(N, H, D)}, r"w1 has the shape \[10, 6\], but phi"),
        ({"activation": "tanh"}, "activation='tanh' is not one of 'gelu', 'gelu-tanh', 'relu'"),
        ({"norm": "rms"}, "norm='rms' is not one of"),
        ({"norm": "l2-plus"}, "norm='l2-plus' needs an eps"),
        ({"norm": nn.LayerNorm(D), "eps": 1e-6}, "gain and shift are already in the LayerNorm"),
        ({"norm": nn.LayerNorm(7)}, r"norm is for width \[7\]"),
        ({"norm": nn.GroupNorm(1, D)}, "norm is a GroupNorm"),
        ({"norm": "l2", "shift": torch.zeros(D)}, "shift needs norm='layernorm'"),
        ({"norm": "l2", "gain": torch.zeros(7)}, r"gain has the shape \[7\], expected \[6\]"),
        ({"slots_from": "normalized"}, "slots_from='normalized' is not one of"),
    ],
)
def test_a_soft_moe_that_does_not_fit_names_what_was_expected(
    given: dict[str, Any], says: str
) -> None:
    whole: dict[str, Any] = {"phi": PHI, "experts": pairs()} | given
    with pytest.raises(UsageError, match=says):
        moexport.SoftMoE(**whole).build("")


CP = [torch.randn(N, 3), torch.randn(D + 1, 3), torch.randn(OUT, 3)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gates": nn.Linear(D, N)}, "gates is not a list"),
        ({"gates": [nn.Linear(N, D)]}, r"weights.factors are for \[4\] experts by level"),
        ({"gates": [torch.zeros(N)]}, r"gates\[0\] has the shape \[4\], expected \[d, n\]"),
        ({"weights": CP[:2]}, "weights has 2 factors, but 1 levels of experts"),
        ({"weights": [*CP[:2], torch.randn(OUT, 2)]}, "do not share one rank"),
        ({"weights": torch.zeros(N, D)}, "need 3 axes"),
        ({"weights": "cp"}, "weights is a str, not a weight tensor"),
        ({"second": [torch.randn(N, 3), torch.randn(9, 3), torch.randn(OUT, 3)]}, "of width 9"),
        ({"second": torch.randn(N, OUT, 3)}, "has the form cp, but second has the form full"),
        ({"norm": "bn"}, "norm='bn' is neither 'none' nor 'ln' nor a list"),
        ({"norm": [nn.BatchNorm1d(N + 1)]}, r"norm\[0\]: its mean has the shape \[5\]"),
        ({"norm": [nn.BatchNorm1d(N, track_running_stats=False)]}, "without statistics"),
        ({"norm": "ln"}, "the gate also has a bias"),
        ({"activation": "relu"}, "activation='relu' is not one of"),
        ({"input_norm": nn.LayerNorm(D, eps=1e-6)}, "input_norm=LayerNorm"),
    ],
)
def test_a_mumoe_that_does_not_fit_names_what_was_expected(
    given: dict[str, Any], says: str
) -> None:
    whole: dict[str, Any] = {"gates": [nn.Linear(D, N)], "weights": CP, "norm": "none"} | given
    with pytest.raises(UsageError, match=says):
        moexport.MuMoE(**whole).build("")
