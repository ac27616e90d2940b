"""Mixtures of experts from the literature, each as one module written from its formulas.

Each layer selects experts for tokens in its own way, and the two adapters at the end of the file
export all of them. Copy this file into an empty folder, and there:

    moexport export mixtures:build --set mixture=noisy-top-k --k 1 -o noisy-top-k
    moexport verify noisy-top-k

docs/own-layer.md explains adapters for experts with a router. Letters: b sequences of m
tokens, d wide; n experts, of which a token gets k.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import moexport
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Choice = tuple[Tensor, Tensor]
"""Which experts each token gets, (b, m, k) whole numbers, and the weight of each, (b, m, k)."""


class Expert(nn.Module):
    """A two-layer perceptron for the tokens that the router sends to it."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the rows' outputs."""
        outputs: Tensor = self.down(F.relu(self.up(rows)))
        return outputs


class Bank(nn.Module):
    """n experts, one after the other: y_t = Σ_j weights[t, j] · E_i(x_t), i = index[t, j]."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Returns outputs (b, m, d) for tokens x (b, m, d) and selected experts (b, m, k)."""
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (index == number)).sum(dim=-1)
            chosen = (index == number).any(dim=-1)
            y[chosen] += share[chosen].unsqueeze(-1) * expert(x[chosen])
        return y


class Mixture(nn.Module):
    """Experts with a router: each mixture below selects a token's experts in `route`."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.bank = Bank(dim, hidden, experts)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """Returns the experts for tokens x (b, m, d), which represent the words `ids` (b, m)."""
        raise NotImplementedError

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Returns the tokens' outputs (b, m, d)."""
        y: Tensor = self.bank(x, *self.route(x, ids))
        return y


class Continuous(Mixture):
    """y = Σ_i softmax(x·W)_i · E_i(x), as in "Adaptive mixtures of local experts".

    Jacobs, Jordan, Nowlan and Hinton, 1991. There is no k: every expert has its share of every
    token, and leaving one out is another model.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """All experts, by a softmax over them."""
        gates = self.gate(x).softmax(dim=-1)
        everyone = torch.arange(gates.shape[-1]).expand_as(gates)
        return everyone, gates


class NoisyTopK(Mixture):
    """y = Σ_{i in T} softmax(H_T)_i · E_i(x), T the k largest of H(x) = x·W + noise.

    "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", Shazeer et
    al., 2017. The noise, normal with the deviation softplus(x·W_noise), balances training and is
    absent at inference. k is the number of experts per token: a smaller k omits those with the
    smallest logits, and the softmax is over the others.
    """

    def __init__(self, dim: int, hidden: int, experts: int, k: int = 2) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.noise = nn.Linear(dim, experts, bias=False)
        self.trained_k = k

    def route(self, x: Tensor, ids: Tensor, k: int | None = None) -> Choice:
        """The k largest logits."""
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        kept, index = logits.topk(self.trained_k if k is None else k, dim=-1)
        return index, kept.softmax(dim=-1)


class Switch(Mixture):
    """y = p_i · E_i(x), i the largest of p = softmax(x·W).

    "Switch transformers: scaling to trillion parameter models with simple and efficient sparsity",
    Fedus, Zoph and Shazeer, 2022. k is 1, as the paper proposes: there is no smaller k, and a
    second expert was never trained to add to the first.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """The most probable expert, with its probability."""
        best, index = self.gate(x).softmax(dim=-1).max(dim=-1, keepdim=True)
        return index, best


class GShard(Mixture):
    """y = Σ of two experts g_i/(g_1 + g_2) · E_i(x), as far as each expert has seats.

    "GShard: scaling giant models with conditional computation and automatic sharding", Lepikhin et
    al., 2021, its Algorithm 1: in a group of m tokens, here a sequence, an expert has C seats; the
    tokens' first choices take them in order, then their second ones, and who finds none gets
    nothing of that expert. (In training a second choice is dropped at random, too.) k is 2: the two
    weights are a share of their sum, so that one of them alone is another model.
    """

    def __init__(self, dim: int, hidden: int, experts: int, seats: float = 2.0) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.seats = seats

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """The two largest gates; a token without a seat has the weight 0 there."""
        gates = self.gate(x).softmax(dim=-1)
        n = gates.shape[-1]
        capacity = math.ceil(self.seats * x.shape[1] / n)
        best, index = gates.topk(2, dim=-1)
        first, second = F.one_hot(index[..., 0], n), F.one_hot(index[..., 1], n)  # (b, m, n)
        asked = first.sum(dim=1, keepdim=True)  # the first choices of all tokens
        place = torch.stack(
            [
                (first.cumsum(dim=1) * first).sum(dim=-1),
                ((asked + second.cumsum(dim=1)) * second).sum(dim=-1),
            ],
            dim=-1,
        )
        weights = best / best.sum(dim=-1, keepdim=True)
        return index, weights * (place <= capacity)


class Base(Mixture):
    """y = sigmoid(x·w_a) · E_a(x), a the expert with the largest x·w_a.

    "BASE layers: simplifying training of large, sparse models", Lewis, Bhosale, Dettmers, Goyal and
    Zettlemoyer, 2021. In training a is a balanced assignment of a batch's tokens; at inference it
    is the greedy one. k is 1: one expert per token, weighted by the sigmoid.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__(dim, hidden, experts)
        self.embeddings = nn.Parameter(torch.randn(experts, dim) / dim**0.5)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """The nearest expert's embedding."""
        score, index = (x @ self.embeddings.T).max(dim=-1, keepdim=True)
        return index, score.sigmoid()


class Hash(Mixture):
    """y = E_h(x), h the number that a fixed table has for the token's word.

    "Hash layers for large sparse models", Roller, Sukhbaatar, Szlam and Weston, 2021: nothing is
    learned and nothing is ranked. There is no k: a word has its expert, and the router no second.
    """

    table: Tensor

    def __init__(self, dim: int, hidden: int, experts: int, words: int) -> None:
        super().__init__(dim, hidden, experts)
        self.register_buffer("table", torch.randperm(words) % experts)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """The word's expert, with the weight 1."""
        index = self.table[ids].unsqueeze(-1)
        return index, torch.ones_like(index, dtype=x.dtype)


class ExpertChoice(nn.Module):
    """y = Σ over the experts that chose x of G·E(x): each expert takes its c best tokens.

    "Mixture-of-experts with expert choice routing", Zhou et al., 2022: S = softmax(x·W) over the
    experts; an expert takes the c = m·f/n tokens of a sequence with its largest S, and a token gets
    as many experts as chose it. There is no k: f, the mean number of experts per token, sets c.

    Here no router selects k experts for a token, so the adapter describes only the bank, which is
    called with rows and experts; the selection around it is the network's own code.
    """

    def __init__(self, dim: int, hidden: int, experts: int, mean: float = 2.0) -> None:
        super().__init__()
        self.bank = Bank(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.mean = mean

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Returns the tokens' outputs (b, m, d)."""
        b, m, d = x.shape
        scores = self.gate(x).softmax(dim=-1).transpose(1, 2)  # (b, n, m)
        n = scores.shape[1]
        taken, place = scores.topk(max(1, int(m * self.mean / n)), dim=-1)  # (b, n, c)
        place = place.flatten(1).unsqueeze(-1).expand(-1, -1, d)  # (b, n·c, d)
        expert = torch.arange(n).view(1, n, 1).expand_as(taken).reshape(b, -1, 1)
        rows = self.bank(x.gather(1, place), expert, taken.reshape(b, -1, 1))
        return torch.zeros_like(x).scatter_add(1, place, rows)


class Hierarchical(Mixture):
    """y = Σ_i Σ_j G(x)_i · G_i(x)_j · E_ij(x): a gate over groups, and one in each group.

    Shazeer et al., 2017, appendix B; the tree of gates is that of "Hierarchical mixtures of experts
    and the EM algorithm", Jordan and Jacobs, 1994. Each gate is the softmax of its largest logits.
    k counts experts, over both levels: an even k is k/2 experts in each of two groups, an odd one
    all in the best group.
    """

    def __init__(self, dim: int, hidden: int, experts: int, groups: int = 4, k: int = 4) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, groups, bias=False)
        self.gates = nn.Linear(dim, experts, bias=False)
        self.groups, self.trained_k = groups, k

    def route(self, x: Tensor, ids: Tensor, k: int | None = None) -> Choice:
        """The best experts of the best groups; a weight is the product of both gates."""
        k = self.trained_k if k is None else k
        groups = 2 if k % 2 == 0 else 1
        kept, group = self.gate(x).topk(groups, dim=-1)  # (b, m, groups)
        logits = self.gates(x).unflatten(-1, (self.groups, -1))  # (b, m, groups of all, each)
        own = logits.gather(2, group.unsqueeze(-1).expand(*group.shape, logits.shape[-1]))
        inner, place = own.topk(k // groups, dim=-1)
        weights = kept.softmax(dim=-1).unsqueeze(-1) * inner.softmax(dim=-1)
        index = group.unsqueeze(-1) * logits.shape[-1] + place
        return index.flatten(2), weights.flatten(2)


class Deep(nn.Module):
    """z = Σ_i g_i(x) · E_i(x), then y = Σ_j g'_j(z) · E'_j(z): two layers in turn.

    "Learning factored representations in a deep mixture of experts", Eigen, Ranzato and Sutskever,
    2013: the second gate sees what the first layer returned, so that pairs of experts are chosen.
    The paper mixes all experts of a layer; here each has a top-k gate. k is a number per layer:
    `--k 2,1`.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.first = NoisyTopK(dim, hidden, experts)
        self.second = NoisyTopK(dim, hidden, experts)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Returns the tokens' outputs (b, m, d)."""
        y: Tensor = self.second(self.first(x, ids), ids)
        return y


# Adapters, which describe the layers above to moexport.


@moexport.adapts(Mixture)
def adapt(layer: Mixture) -> moexport.Experts:
    """Returns the experts of a mixture with its router."""
    experts = [(expert.up, expert.down) for expert in layer.bank.experts]
    return moexport.Experts(router=layer.route, experts=experts, activation="relu")


@moexport.adapts(Bank)
def adapt_bank(bank: Bank) -> moexport.Experts:
    """Returns experts that are called with the selected experts and weights."""
    experts = [(expert.up, expert.down) for expert in bank.experts]
    return moexport.Experts(experts=experts, activation="relu")


WORDS, LENGTH = 96, 32


class Words(nn.Module):
    """The same small network around each mixture: words (b, m) to scores of words (b, m, words)."""

    def __init__(self, mixture: nn.Module, words: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.places = nn.Parameter(torch.randn(LENGTH, dim) / 2)
        self.norm = nn.LayerNorm(dim)
        self.mixture = mixture
        self.head = nn.Linear(dim, words)

    def example_input(self) -> Tensor:
        """Returns an input on which moexport compares this network with its own copy of it."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.embed.num_embeddings, (4, LENGTH), generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the scores."""
        x = self.embed(ids) + self.places
        x = x + self.mixture(self.norm(x), ids)
        scores: Tensor = self.head(x)
        return scores


MIXTURES: dict[str, Callable[[int, int, int], nn.Module]] = {
    "continuous": Continuous,
    "noisy-top-k": NoisyTopK,
    "switch": Switch,
    "gshard": GShard,
    "base": Base,
    "hash": lambda dim, hidden, experts: Hash(dim, hidden, experts, WORDS),
    "expert-choice": ExpertChoice,
    "hierarchical": Hierarchical,
    "deep": Deep,
}


def build(
    mixture: str = "noisy-top-k", dim: int = 32, hidden: int = 64, experts: int = 16
) -> nn.Module:
    """Returns the network with random weights; --weights fills it, --set mixture=base chooses."""
    torch.manual_seed(0)
    return Words(MIXTURES[mixture](dim, hidden, experts), WORDS, dim)
