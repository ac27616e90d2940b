"""`moexport demo --family mumoe`: CP and TR classifiers, an MLP-Mixer and a GPT-2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...bench.data import LabelledData
from ...common.console import Progress
from ...common.text import table
from ...common.threads import with_threads
from ...common.writing import whole_file
from ...data.batches import Array
from ...exporter.families.mumoe_gpt2 import GPT2, GPT2Block, GPT2Spec
from ...exporter.families.mumoe_mixer import MixerSpec, MlpMixer, PreNormResidual
from ...exporter.inspect import support
from ...graphs.layers import mumoe
from ...graphs.layers.mumoe import FactorisedSpec, Form, MuMoESpec
from ..text.language import python_topics
from . import digits
from .demo import THREADS, Demo, Exported, Group, TrainedNetwork, save_data

EXPERTS = 32
KEPT = ("n", "16", "8", "4", "2", "1")
SEED = 0
LENGTH = 64
"""The number of positions of the GPT-2."""

CAVEAT = """A smaller k is hardly faster here: experts are a small part of a muMoE's work, and all
of it is computed for every k; only the cost of choosing experts falls. The smallest k that keeps
the accuracy shows how many experts the task needs."""

SUPPORT_HEADER = ("model", "layer", "experts n", "mean", "p99", "max")


def train(directory: Path, progress: Progress) -> list[Group]:
    """Trains and saves four networks, each to be exported once with k as an input of the graph."""
    with torch.random.fork_rng(devices=[]), with_threads(THREADS):
        torch.manual_seed(SEED)
        return [*_on_digits(directory, progress), _on_text(directory, progress)]


def _supports(groups: Sequence[Group]) -> Iterator[str]:
    """Yields a table of how many coefficients per token are nonzero."""
    rows = [
        (network.name, row.layer, row.experts, f"{row.mean:.1f}", f"{row.p99:.0f}", row.max)
        for group in groups
        for network in group.networks
        for row in support(network.load(), str(network.bundles[0].data))
    ]
    yield "Nonzero coefficients per token (k = max changes nothing):\n" + table(
        SUPPORT_HEADER, rows
    )


def _group(
    name: str, data: LabelledData, directory: Path, configs: Mapping[str, Mapping[str, Any]]
) -> Group:
    """Returns a group of trained networks; `configs` has their settings by checkpoint name."""
    file = save_data(data, directory / f"{name}-test.npz")
    networks = tuple(
        TrainedNetwork(
            network, directory / f"{network}.pt", (Exported(network, "input", file),), config
        )
        for network, config in configs.items()
    )
    return Group(f"report-{name}", data, networks)


def _on_digits(directory: Path, progress: Progress) -> Iterator[Group]:
    """Trains CP and TR classifiers on images as vectors, and an MLP-Mixer on images."""
    data = digits.load_digits()
    images, labels = torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.labels)
    flat = data.test.inputs.reshape(len(data.test), -1)
    forms: tuple[tuple[Form, int], ...] = (("cp", 64), ("tr", 16))
    for form, rank in forms:
        progress.step(f"training a {form.upper()} classifier on {len(images)} digits")
        head = trainable_head(form, EXPERTS, flat.shape[1], digits.CLASSES, rank)
        batches = _random_batches(images.flatten(1), labels, 128)
        save(fit(head, batches, 250, 3e-3), directory / f"digits-{form}.pt")
    progress.step(f"training an MLP-Mixer on {len(images)} digits")
    spec = MixerSpec(grid=(4, 4), patch=7, channels=1, dim=64, depth=2, classes=digits.CLASSES)
    mixer = trainable_mixer(spec, EXPERTS, hidden=(32, 128), rank=48)
    save(fit(mixer, _random_batches(images, labels, 64), 250, 3e-3), directory / "mixer.pt")
    vectors = replace(data.test, inputs=flat)
    heads = {f"digits-{form}": {"input_rank": 2} for form, _ in forms}
    yield _group("digits", vectors, directory, heads)
    mixers = {"mixer": {"patch_size": spec.patch, "act": "entmax15"}}
    yield _group("mixer", data.test, directory, mixers)


def _on_text(directory: Path, progress: Progress) -> Group:
    """Trains a two-layer GPT-2 that predicts the next character."""
    text = load_topics()
    progress.step(f"training a GPT-2 on {len(text.train)} characters of Python's help")
    spec = GPT2Spec(LENGTH, len(text.characters), depth=2, heads=4, dim=64, bias=True)
    model = trainable_gpt2(spec, EXPERTS, hidden=256, rank=48)
    fit(model, random_windows(text.train, 32, LENGTH), 600, 3e-3)
    save(model, directory / "gpt2.pt", n_layer=spec.depth, n_head=spec.heads, n_embd=spec.dim)
    data = LabelledData(text.sequences(LENGTH, 128), None, "input_ids")
    return _group("gpt2", data, directory, {"gpt2": {}})


def _random_batches(inputs: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields random batches of labelled inputs without end."""
    while True:
        rows = torch.randint(len(inputs), (size,))
        yield inputs[rows], labels[rows]


def random_windows(ids: np.ndarray, size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields random batches without end: sequences, and the next token at each position."""
    tokens = torch.from_numpy(ids)
    offsets = torch.arange(length + 1)
    while True:
        window = tokens[torch.randint(len(tokens) - length, (size, 1)) + offsets]
        yield window[:, :-1], window[:, 1:]


HELD_OUT = 9
"""One in this many topics is held out for the test."""


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids [tokens] for training and, from other topics, for testing; `characters` by id."""

    characters: str
    train: Array
    test: Array

    def sequences(self, length: int, count: int) -> Array:
        """Returns the first `count` sequences [count, length] of the test text, int64."""
        count = min(count, len(self.test) // length)
        return self.test[: count * length].reshape(count, length)


def load_topics() -> Text:
    """Returns the topics of this Python's `pydoc`, one id per ASCII character."""
    texts = python_topics()
    characters = "".join(sorted(set("".join(texts))))
    codes = np.zeros(128, np.int64)
    codes[[ord(c) for c in characters]] = np.arange(len(characters))
    ids = [codes[np.frombuffer(text.encode("ascii"), np.uint8)] for text in texts]
    test = ids[::HELD_OUT]
    train = [topic for index, topic in enumerate(ids) if index % HELD_OUT]
    return Text(characters, np.concatenate(train), np.concatenate(test))


Batches = Iterable[tuple[Tensor, Tensor]]
"""Inputs and their classes."""

TR_RANKS = (4, 4)
"""The two small ranks of the papers' TR layers; `rank` is the third."""


class TrainableMuMoE(nn.Module):
    """A muMoE layer or block with one level of experts: (b, m, d) to (b, m, o)."""

    def __init__(self, spec: MuMoESpec) -> None:
        super().__init__()
        self.spec = spec
        self.projs = nn.ParameterList(
            [nn.Parameter(torch.randn(spec.dim, n) * spec.dim**-0.5) for n in spec.levels]
        )
        self.bn = nn.ModuleList([nn.BatchNorm1d(n, affine=False) for n in spec.levels])
        if spec.input_norm:
            self.input_ln = nn.LayerNorm(spec.dim)
        self.MuMoE = _FactorWeights(spec.tensors[0])
        if len(spec.tensors) > 1:
            self.MuMoE2 = _FactorWeights(spec.tensors[1])

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output; a vector (b, d) counts as one token."""
        if x.ndim == 2:
            x = x.unsqueeze(1)
        gates = tuple(
            entmax15(norm((x @ projection).mT).mT)
            for norm, projection in zip(self.bn, self.projs, strict=True)
        )
        y = self.input_ln(x) if self.spec.input_norm else x
        y = mumoe.contract(self.spec.tensors[0], list(self.MuMoE.factors), gates, y)
        if len(self.spec.tensors) > 1:
            second = list(self.MuMoE2.factors)
            y = mumoe.contract(self.spec.tensors[1], second, gates, F.gelu(y))
        return y


class _FactorWeights(nn.Module):
    """The factors or cores of one tensor; all experts start near the same linear layer."""

    def __init__(self, spec: FactorisedSpec) -> None:
        super().__init__()
        *experts, inner, outer = spec.shapes
        expert_factors = [1.0 + torch.randn(shape) for shape in experts]
        if spec.form == "tr":  # each expert's r × r' slice is near the identity
            expert_factors = [
                torch.eye(s[0], s[2]).unsqueeze(1) * a
                for s, a in zip(experts, expert_factors, strict=True)
            ]
        fan_out = spec.ranks[0] * (spec.ranks[-1] if spec.form == "tr" else 1)
        self.factors = nn.ParameterList(
            [
                *expert_factors,
                torch.empty(inner).uniform_(-1, 1) * spec.dim**-0.5,
                torch.empty(outer).uniform_(-1, 1) * fan_out**-0.5,
            ]
        )


def entmax15(logits: Tensor) -> Tensor:
    """Returns p = [z − τ]₊² for z = logits/2, where τ is the root of f = Σp − 1; differentiable.

    τ is found by sorting, without a gradient; one Newton step from there does not change its value
    but adds the gradient of the root, −∂f/∂z / ∂f/∂τ.
    """
    z = logits / 2
    with torch.no_grad():
        largest = mumoe.entmax15(logits).amax(dim=-1, keepdim=True).sqrt()
        tau = z.amax(dim=-1, keepdim=True) - largest
        slope = 2 * (z - tau).clamp_min(0).sum(dim=-1, keepdim=True)
    excess = (z - tau).clamp_min(0).square().sum(dim=-1, keepdim=True) - 1
    return (z - (tau + excess / slope)).clamp_min(0).square()


def tensor_spec(form: Form, experts: int, dim: int, out: int, rank: int) -> FactorisedSpec:
    """Returns the spec of a tensor with a bias, whose CP rank or last TR rank is `rank`."""
    ranks = (rank,) if form == "cp" else (*TR_RANKS, rank)
    return FactorisedSpec(form=form, levels=(experts,), dim=dim, out=out, ranks=ranks, bias=True)


def trainable_head(form: Form, experts: int, dim: int, classes: int, rank: int) -> TrainableMuMoE:
    """Returns a classifier of vectors (b, d) with a single muMoE layer."""
    return TrainableMuMoE(MuMoESpec("layer", (tensor_spec(form, experts, dim, classes, rank),)))


def trainable_mixer(spec: MixerSpec, experts: int, hidden: tuple[int, int], rank: int) -> MlpMixer:
    """Returns an MLP-Mixer with CP blocks; `hidden` has their widths for tokens and channels."""
    model = MlpMixer(spec)
    for block in model.mixer_blocks:
        assert isinstance(block, nn.Sequential)
        tokens, channels = block[0], block[1]
        assert isinstance(tokens, PreNormResidual) and isinstance(tokens.fn, nn.Sequential)
        assert isinstance(channels, PreNormResidual)
        tokens.fn[1] = _block(experts, spec.tokens, hidden[0], rank)
        channels.fn = _block(experts, spec.dim, hidden[1], rank)
    return model


def trainable_gpt2(spec: GPT2Spec, experts: int, hidden: int, rank: int) -> GPT2:
    """Returns a GPT-2 with CP blocks instead of MLPs, and embeddings initialised as in nanoGPT."""
    model = GPT2(spec)
    for name, parameter in model.named_parameters():
        if name.endswith(("wte.weight", "wpe.weight")):
            nn.init.normal_(parameter, std=0.02)
    blocks = model.transformer["h"]
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        assert isinstance(block, GPT2Block)
        block.mlp.MuMoE_layer = _block(experts, spec.dim, hidden, rank, input_norm=True)
    return model


def _block(
    experts: int, dim: int, hidden: int, rank: int, *, input_norm: bool = False
) -> TrainableMuMoE:
    tensors = (
        tensor_spec("cp", experts, dim, hidden, rank),
        tensor_spec("cp", experts, hidden, dim, rank),
    )
    return TrainableMuMoE(MuMoESpec("block", tensors, input_norm=input_norm))


def fit(model: nn.Module, batches: Batches, steps: int, learning_rate: float) -> nn.Module:
    """Trains a model to predict the classes of its last axis; returns it in eval mode.

    The optimiser is AdamW; the learning rate falls to zero along half a cosine.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    losses = (
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        for inputs, targets in islice(batches, steps)
    )
    digits.descend(optimiser, losses, schedule)
    return model.eval()


def save(model: nn.Module, path: Path, **arguments: object) -> None:
    """Writes the weights as the released code does, and `arguments` as nanoGPT's `model_args`."""
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    with whole_file(path) as partial:
        torch.save({"model": state, "model_args": arguments} if arguments else state, partial)


DEMO = Demo("moexport demo --family mumoe", train, KEPT, _supports, (CAVEAT,))
