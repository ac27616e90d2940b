"""muMoE models that can be trained, under the names of the released code, and their training.

The networks around the layers are those of `exporter.hosts`, which have these names already. Gates
begin with small random weights and batch normalisation records its statistics while training.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...exporter.families.gpt2 import GPT2, Block, GPT2Spec
from ...exporter.families.mixer import MixerSpec, MlpMixer, PreNormResidual
from ...graphs.layers import mumoe
from ...graphs.layers.mumoe_spec import FactorisedSpec, Form, MuMoESpec

Batches = Iterable[tuple[Tensor, Tensor]]
"""Inputs and the classes that belong to them."""

TR_RANKS = (4, 4)
"""The two small ranks of the papers' TR layers; the third is the one that is asked for."""


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
        self.MuMoE = _Factors(spec.tensors[0])
        if len(spec.tensors) > 1:
            self.MuMoE2 = _Factors(spec.tensors[1])

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output; vectors (b, d) are one token each."""
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


class _Factors(nn.Module):
    """The factors or cores of one tensor: every expert begins near the same linear layer."""

    def __init__(self, spec: FactorisedSpec) -> None:
        super().__init__()
        *experts, inner, outer = spec.shapes
        alike = [1.0 + torch.randn(shape) for shape in experts]
        if spec.form == "tr":  # each expert's r × r' slice is near the identity
            alike = [
                torch.eye(s[0], s[2]).unsqueeze(1) * a for s, a in zip(experts, alike, strict=True)
            ]
        fan_out = spec.ranks[0] * (spec.ranks[-1] if spec.form == "tr" else 1)
        self.factors = nn.ParameterList(
            [
                *alike,
                torch.empty(inner).uniform_(-1, 1) * spec.dim**-0.5,
                torch.empty(outer).uniform_(-1, 1) * fan_out**-0.5,
            ]
        )


def entmax15(logits: Tensor) -> Tensor:
    """Returns p = [z/2 − τ]₊² with Σp = 1, with its gradient.

    τ is found by sorting, without a gradient; one Newton step from there leaves it as it is and
    gives it the gradient of the root, −∂f/∂z / ∂f/∂τ.
    """
    z = logits / 2
    with torch.no_grad():
        largest = mumoe.entmax15(logits).amax(dim=-1, keepdim=True).sqrt()
        tau = z.amax(dim=-1, keepdim=True) - largest
        slope = 2 * (z - tau).clamp_min(0).sum(dim=-1, keepdim=True)
    excess = (z - tau).clamp_min(0).square().sum(dim=-1, keepdim=True) - 1
    return (z - (tau + excess / slope)).clamp_min(0).square()


def tensor(form: Form, experts: int, dim: int, out: int, rank: int) -> FactorisedSpec:
    """Returns a tensor with a bias, of a CP rank or of TR ranks that end with it."""
    ranks = (rank,) if form == "cp" else (*TR_RANKS, rank)
    return FactorisedSpec(form, (experts,), dim, out, ranks, bias=True)


def head(form: Form, experts: int, dim: int, classes: int, rank: int) -> TrainableMuMoE:
    """Returns a classifier that is one muMoE layer on vectors (b, d)."""
    return TrainableMuMoE(MuMoESpec("layer", (tensor(form, experts, dim, classes, rank),)))


def mixer(spec: MixerSpec, experts: int, hidden: tuple[int, int], rank: int) -> MlpMixer:
    """Returns an MLP-Mixer with CP blocks, `hidden` wide for tokens and for channels."""
    model = MlpMixer(spec)
    for block in model.mixer_blocks:
        assert isinstance(block, nn.Sequential)
        tokens, channels = block[0], block[1]
        assert isinstance(tokens, PreNormResidual) and isinstance(tokens.fn, nn.Sequential)
        assert isinstance(channels, PreNormResidual)
        tokens.fn[1] = _block(experts, spec.tokens, hidden[0], rank)
        channels.fn = _block(experts, spec.dim, hidden[1], rank)
    return model


def gpt2(spec: GPT2Spec, experts: int, hidden: int, rank: int) -> GPT2:
    """Returns a GPT-2 with CP blocks for MLPs, its embeddings as small as nanoGPT's."""
    model = GPT2(spec)
    for name, parameter in model.named_parameters():
        if name.endswith(("wte.weight", "wpe.weight")):
            nn.init.normal_(parameter, std=0.02)
    blocks = model.transformer["h"]
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        assert isinstance(block, Block)
        block.mlp.MuMoE_layer = _block(experts, spec.dim, hidden, rank, input_norm=True)
    return model


def _block(
    experts: int, dim: int, hidden: int, rank: int, *, input_norm: bool = False
) -> TrainableMuMoE:
    tensors = (tensor("cp", experts, dim, hidden, rank), tensor("cp", experts, hidden, dim, rank))
    return TrainableMuMoE(MuMoESpec("block", tensors, input_norm=input_norm))


def fit(model: nn.Module, batches: Batches, steps: int, learning_rate: float) -> nn.Module:
    """Trains a model to tell the classes of its last axis; returns it in eval mode.

    AdamW, its rate falling to zero along half a cosine over the steps.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        optimiser.zero_grad()
        scores = model(inputs)
        loss = F.cross_entropy(scores.flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return model.eval()


def save(model: nn.Module, path: Path, **arguments: object) -> None:
    """Writes the weights as the released code does: `arguments` as nanoGPT's `model_args`."""
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    torch.save({"model": state, "model_args": arguments} if arguments else state, path)
