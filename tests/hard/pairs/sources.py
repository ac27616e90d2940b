"""What is exported: a small model of each kind, and what it computes, apart from the package."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import torch
from moexport.exporter.model import Model
from moexport.graphs.layers.base import Kind
from moexport.plugins.token_routed.tests import architectures
from moexport.tests.hard.pairs import networks
from moexport.tests.hard.pairs.formulas import Change, by_formulas
from moexport.tests.recorded import read_case
from torch import nn

ROWS = 6
"""Inputs of each source: two batches of three."""

RECORDED: Mapping[str, str] = {
    "soft-moe-vit": "soft_moe_vit",
    "soft-moe-mnist": "soft_moe_mnist_normalized",
    "soft-moe-pytorch": "soft_moe_lucidrains_geglu_ln",
    "soft-moe-conv": "soft_moe_conv",
    "soft-moe-fkodom": "soft_moe_fkodom",
    "mumoe": "mumoe_tr_block_ln",
    "mumoe-mixer": "mumoe_mixer_cp",
    "mumoe-gpt2": "mumoe_gpt2_cp",
}
"""A recorded case of each family that has one."""

OWN: Mapping[str, Callable[[], nn.Module]] = {
    "factory": networks.published,
    "adapter SoftMoE": networks.soft,
    "adapter MuMoE": networks.factors,
    "adapter MuMoE whole": networks.whole,
    "adapter Experts": networks.routed,
}

TRANSFORMERS = "transformers"

FORETELL = (TRANSFORMERS, "mumoe-gpt2")
"""Sources whose outputs are of the tokens to come."""

NAMES = (*RECORDED, *OWN, TRANSFORMERS)

Wanted = tuple[np.ndarray, np.ndarray]
"""Outputs for the rows of a source's inputs, and by how much each row's experts were chosen."""


@dataclass(frozen=True)
class Source:
    """A model as a command line names it, `arguments` after `path`, and inputs for it.

    `tokens` is a count of tokens that its inputs have, 0 without such an axis.
    """

    name: str
    path: str
    arguments: tuple[str, ...]
    kind: Kind
    model: Model
    x: dict[str, np.ndarray]
    tokens: int
    compute: Callable[[Mapping[str, Change]], Wanted]

    @property
    def experts(self) -> dict[str, int]:
        return {name: layer.spec.experts for name, layer in self.model.layers.items()}

    @property
    def trained(self) -> dict[str, int]:
        return {name: layer.spec.trained_k for name, layer in self.model.layers.items()}

    def changes(self, k: Mapping[str, int], **more: Any) -> dict[str, Change]:
        """So many experts of each layer; `more` is of the first layer alone."""
        first = next(iter(k))
        return {n: Change(k=count, **(more if n == first else {})) for n, count in k.items()}


def source(name: str, folder: Path) -> Source:
    """Returns a source by its name, and writes what it needs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in RECORDED:
        return _recorded(name, folder)
    return _own(name) if name in OWN else _transformers(folder)


def _computed(model: Model, x: np.ndarray, changes: Mapping[str, Change]) -> Wanted:
    network, margins = by_formulas(model.module, changes)
    given = torch.from_numpy(x)
    with torch.no_grad():
        y = network(given.double() if given.is_floating_point() else given)
    y = y[0] if isinstance(y, tuple) else y
    assert margins.least is not None
    return y.numpy(), margins.least.numpy()


def _clear(x: np.ndarray, compute: Callable[[np.ndarray, int], Wanted]) -> np.ndarray:
    """The rows whose experts are chosen by the widest margins."""
    margins = np.stack([compute(x, k)[1] for k in (1, 2, 3)]).min(0)
    return x[np.argsort(-margins, kind="stable")[:ROWS]]


def _recorded(name: str, folder: Path) -> Source:
    case = read_case(RECORDED[name])
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    model = moexport.load(case.weights, config=case.config)
    layers = model.layers
    kind = next(iter(layers.values())).spec.kind
    recorded = case.x.astype(np.int64 if case.x.dtype.kind == "i" else np.float32)
    recorded = recorded[:, None] if name == "mumoe" and recorded.ndim == 2 else recorded

    def of(x: np.ndarray, k: int | None) -> Wanted:
        return _computed(model, x, {each: Change(k=k) for each in layers})

    for k in (None, *case.ks):  # the formulas are those of the published code
        y, wanted = of(recorded, k)[0], case.y(k)
        assert np.abs(y - wanted).max() <= 2e-5 * np.abs(wanted).max(), (name, k)
    random = np.random.default_rng(0)
    if recorded.dtype == np.int64:
        many = random.integers(0, case.config["vocab_size"], (4 * ROWS, 5))
    else:
        count = ROWS if recorded[0].size > 1 << 14 else 4 * ROWS
        many = random.standard_normal((count, *recorded.shape[1:])).astype(np.float32)
        many *= recorded.std()
    axes = model.input.dynamic_axes
    x = _clear(many, of)
    tokens = 0 if not {"tokens", "height", "width"} & {*axes} else x.shape[1]
    tokens = x.shape[2] * x.shape[3] if "height" in axes else tokens
    return Source(
        name,
        str(case.weights),
        ("--config", str(config)),
        kind,
        model,
        {model.input.name: x},
        tokens,
        lambda changes: _computed(model, x, changes),
    )


def _own(name: str) -> Source:
    factory = OWN[name]
    path = f"{networks.__name__}:{factory.__name__}"
    random = np.random.default_rng(0)
    many = random.standard_normal((4 * ROWS, networks.TOKENS, networks.FEATURES)).astype(np.float32)
    model = moexport.load(path, example=many[:4])
    kind = next(iter(model.layers.values())).spec.kind

    def routed(x: np.ndarray, changes: Mapping[str, Change]) -> Wanted:
        network: Any = factory().double()
        for layer, change in zip((network.first, network.second), changes.values(), strict=True):
            layer.k, layer.without = change.k, next(iter(change.ablated), -1)
        return _with_margins(network, x, [network.first.router, network.second.router], changes)

    def of(x: np.ndarray, k: int) -> Wanted:
        changes = {each: Change(k=k) for each in model.layers}
        return routed(x, changes) if kind == "experts" else _computed(model, x, changes)

    if kind != "experts":  # the formulas are those of the network's own layers
        wanted = factory().double()(torch.from_numpy(many).double()).detach().numpy()
        y, _ = of(many, 99)
        assert np.abs(y - wanted).max() <= 1e-6 * np.abs(wanted).max(), name
    x = _clear(many, of)
    return Source(
        name,
        path,
        (),
        kind,
        model,
        {model.input.name: x},
        x.shape[1] if "tokens" in model.input.dynamic_axes else 0,
        lambda changes: routed(x, changes) if kind == "experts" else _computed(model, x, changes),
    )


def _with_margins(
    network: nn.Module, x: Any, routers: list[nn.Module], changes: Mapping[str, Change]
) -> Wanted:
    """What a network of token-routed experts gives; margins are those of its routers' scores."""
    margins: list[torch.Tensor] = []

    def ranked(k: int | None) -> Any:
        def hook(_: nn.Module, __: Any, scores: Any) -> None:
            logits = scores[0] if isinstance(scores, tuple) else scores
            top = logits.softmax(-1).reshape(
                ROWS if len(x) == ROWS else len(x), -1, logits.shape[-1]
            )
            top = top.sort(-1, descending=True).values
            last = min(k or 1, top.shape[-1] - 1)
            margins.append(((top[..., last - 1] - top[..., last]) / top[..., last - 1]).amin(1))

        return hook

    hooks = [
        router.register_forward_hook(ranked(change.k))
        for router, change in zip(routers, changes.values(), strict=True)
    ]
    with torch.no_grad():
        given = torch.from_numpy(x)
        if given.is_floating_point():
            found: Any = network(given.double())
        else:
            found = network(given, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return found.numpy(), torch.stack(margins).amin(0).numpy()


def _transformers(folder: Path) -> Source:
    mixtral = architectures.ARCHITECTURES["mixtral"]
    place = folder / "mixtral"
    if not place.exists():
        architectures.save(mixtral, place, hidden_size=32, intermediate_size=64)
    model = moexport.load(place)
    library = architectures.Library(mixtral, place).model
    random = np.random.default_rng(0)
    many = random.integers(0, architectures.SMALL["vocab_size"], (4 * ROWS, 5))

    def of(x: np.ndarray, changes: Mapping[str, Change]) -> Wanted:
        network = copy.deepcopy(library)
        mixtures = [each.mlp for each in network.model.layers]
        for mixture, change in zip(mixtures, changes.values(), strict=True):
            mixture.gate.top_k = mixture.top_k = change.k
            with torch.no_grad():
                mixture.experts.down_proj[list(change.ablated)] = 0
        return _with_margins(network, x, [each.gate for each in mixtures], changes)

    x = _clear(many, lambda x, k: of(x, {each: Change(k=k) for each in model.layers}))
    return Source(
        TRANSFORMERS,
        str(place),
        (),
        "experts",
        model,
        {"input_ids": x},
        x.shape[1],
        lambda changes: of(x, changes),
    )
