"""The literature's mixtures of experts, each in one class: what routes, and one adapter for all.

The experts of all of them are one layer, `Experts`, which is given tokens, the indices of the
experts that each token goes to, and weights. What gives indices and weights is the mixture: a
module around that layer, which stays in the exported graph as it is written here.

    moexport export examples.mixtures:build --set mixture=switch -o switch

docs/token-routed.md says what k is in each.
"""

from __future__ import annotations

import moexport
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, DIM, HIDDEN, EXPERTS, CLASSES = 50, 16, 24, 8, 5


class Experts(nn.Module):
    """n perceptrons with relu: tokens (t, d), index (t, k), weights (t, k) to (t, d)."""

    def __init__(self, n: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(n, DIM, HIDDEN) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(n, HIDDEN, DIM) * HIDDEN**-0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Returns each token's outputs, weighted and added up, (t, d)."""
        hidden = F.relu(torch.einsum("td,tkdh->tkh", tokens, self.up[index]))
        outputs = torch.einsum("tkh,tkhd->tkd", hidden, self.down[index])
        return (outputs * weights[..., None]).sum(dim=1)


@moexport.adapts(Experts)
def adapt(layer: Experts) -> moexport.Experts:
    """Returns what Experts computes, in moexport's words."""
    return moexport.Experts(w1=layer.up, w2=layer.down, gate="none", activation="relu")


class Continuous(nn.Module):
    """Every expert, by the softmax of the gate (Jacobs et al. 1991). There is no k to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = Experts()

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        everyone = torch.arange(EXPERTS).expand(tokens.shape[0], EXPERTS)
        outputs: Tensor = self.experts(tokens, everyone, self.gate(tokens).softmax(dim=-1))
        return outputs


class NoisyTopK(nn.Module):
    """The softmax over the k largest logits (Shazeer et al. 2017); noise is of training alone."""

    def __init__(self, k: int = 2) -> None:
        super().__init__()
        self.gate, self.k = nn.Linear(DIM, EXPERTS, bias=False), k
        self.experts = Experts()

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        logits, index = self.gate(tokens).topk(self.k, dim=-1)
        outputs: Tensor = self.experts(tokens, index, logits.softmax(dim=-1))
        return outputs


class Switch(nn.Module):
    """The most probable expert, weighted with its probability (Fedus et al. 2021): k = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        weights, index = self.gate(tokens).softmax(dim=-1).topk(1, dim=-1)
        outputs: Tensor = self.experts(tokens, index, weights)
        return outputs


class GShard(nn.Module):
    """The two most probable experts, each of which takes a bounded number of tokens.

    An expert serves first choices before second ones, and both in the order of the tokens; what
    is beyond its capacity gets nothing from it (Lepikhin et al. 2020). k = 2, or fewer for a token
    whose experts are full.
    """

    def __init__(self, share: float = 2.0) -> None:
        super().__init__()
        self.gate, self.share = nn.Linear(DIM, EXPERTS, bias=False), share
        self.experts = Experts()

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        probable, index = self.gate(tokens).softmax(dim=-1).topk(2, dim=-1)
        capacity = self.share * tokens.shape[0] / EXPERTS
        wanted = F.one_hot(index, EXPERTS).transpose(0, 1)  # (2, t, n): the first choices first
        queue = wanted.flatten(0, 1).cumsum(dim=0).view_as(wanted) * wanted
        place = queue.sum(dim=-1).T  # (t, 2), from 1
        weights = probable / probable.sum(dim=-1, keepdim=True)
        outputs: Tensor = self.experts(tokens, index, weights * (place <= capacity))
        return outputs


class Base(nn.Module):
    """The nearest expert, and the sigmoid of how near (Lewis et al. 2021): k = 1.

    Training balances the experts by an assignment; at inference the choice is greedy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.centroids = nn.Parameter(torch.randn(EXPERTS, DIM) * DIM**-0.5)
        self.experts = Experts()

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        nearness, index = (tokens @ self.centroids.T).topk(1, dim=-1)
        outputs: Tensor = tokens + self.experts(tokens, index, nearness.sigmoid())
        return outputs


class Hash(nn.Module):
    """The expert that a table gives each word (Roller et al. 2021): k = 1, nothing is learned."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(0, EXPERTS, (WORDS, 1)))
        self.experts = Experts()

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        index = self.table[words]
        outputs: Tensor = self.experts(tokens, index, torch.ones_like(index, dtype=tokens.dtype))
        return outputs


class ExpertChoice(nn.Module):
    """Each expert takes the tokens that want it most (Zhou et al. 2022).

    An expert takes `share` / n of all tokens: k is `share` on average, and differs from token to
    token. What the layer is given are the chosen tokens, n times as many as each expert takes.
    """

    def __init__(self, share: int = 2) -> None:
        super().__init__()
        self.gate, self.share = nn.Linear(DIM, EXPERTS, bias=False), share
        self.experts = Experts()

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        affinity = self.gate(tokens).softmax(dim=-1)
        taken = (self.share * tokens.shape[0] + EXPERTS - 1) // EXPERTS
        weights, chosen = affinity.T.topk(taken, dim=-1)  # (n, c)
        who = torch.arange(EXPERTS)[:, None].expand_as(chosen)
        rows = chosen.reshape(-1)
        outputs = self.experts(tokens[rows], who.reshape(-1, 1), weights.reshape(-1, 1))
        return torch.zeros_like(tokens).index_add(0, rows, outputs)


class Hierarchical(nn.Module):
    """A gate among groups of experts, and one in each group (Jordan and Jacobs 1994, sparse).

    The two most probable groups, and of each its most probable expert: k = 2.
    """

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.groups = groups
        self.outer = nn.Linear(DIM, groups, bias=False)
        self.inner = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, tokens: Tensor, _: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        each = EXPERTS // self.groups
        of_group, group = self.outer(tokens).softmax(dim=-1).topk(2, dim=-1)
        within = self.inner(tokens).view(-1, self.groups, each).softmax(dim=-1)
        best, member = within.max(dim=-1)  # (t, groups)
        index = group * each + member.gather(1, group)
        outputs: Tensor = self.experts(tokens, index, of_group * best.gather(1, group))
        return outputs


class Deep(nn.Module):
    """Two continuous mixtures, one upon the other (Eigen et al. 2013). There is no k to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Continuous(), Continuous()

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        """Returns the tokens' outputs (t, d)."""
        outputs: Tensor = self.second(F.relu(self.first(tokens, words)), words)
        return outputs


MIXTURES: dict[str, type[nn.Module]] = {
    "continuous": Continuous,
    "noisy-top-k": NoisyTopK,
    "switch": Switch,
    "gshard": GShard,
    "base": Base,
    "hash": Hash,
    "expert-choice": ExpertChoice,
    "hierarchical": Hierarchical,
    "deep": Deep,
}


class Tagger(nn.Module):
    """Gives every word of texts (b, m) a class: (b, m, classes)."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.mixture = mixture
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Returns the logits (b, m, classes)."""
        tokens = self.embed(words)
        mixed = self.mixture(tokens.flatten(0, 1), words.flatten())
        logits: Tensor = self.head(tokens + mixed.view_as(tokens))
        return logits


def build(mixture: str = "switch") -> nn.Module:
    """Returns a network with a mixture of that name, and an input to try it with."""
    torch.manual_seed(0)
    network = Tagger(MIXTURES[mixture]()).eval()
    network.example_input = torch.randint(0, WORDS, (3, 12))
    return network
