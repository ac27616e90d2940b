"""Mixtures of experts from the literature, each as one module written from its formulas.

Each layer selects experts for tokens in its own way; the two adapters at the end of the file
export all of them. Copy this file into an empty folder and run there:

    moexport export mixtures:build --set mixture=noisy-top-k --k 1 -o noisy-top-k
    moexport verify noisy-top-k

The page own-layer.md explains adapters for experts with a router. In shapes, b is the number of
sequences, m of tokens, d of the width, n of experts, and k of the experts for each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import moexport
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Choice = tuple[Tensor, Tensor]
"""The indices of each token's experts, (b, m, k), and their weights, (b, m, k)."""


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
    """n experts, one after another: y_t = Σ_j weights[t, j] · E_i(x_t), i = index[t, j]."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Returns outputs (b, m, d) for tokens x (b, m, d) and selected experts (b, m, k)."""
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (index == number)).sum(dim=-1)
            chosen = (index == number).any(dim=-1)
            y[chosen] += weight[chosen].unsqueeze(-1) * expert(x[chosen])
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

    Jacobs, Jordan, Nowlan and Hinton, 1991. There is no k: every expert contributes to every token,
    and leaving one out changes the model.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """Returns all experts, weighted by a softmax."""
        gates = self.gate(x).softmax(dim=-1)
        index = torch.arange(gates.shape[-1]).expand_as(gates)
        return index, gates


class NoisyTopK(Mixture):
    """y = Σ_{i in T} softmax(H_T)_i · E_i(x), T the k largest of H(x) = x·W + noise.

    "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer", Shazeer et
    al., 2017. The noise, normal with the standard deviation softplus(x·W_noise), balances the
    experts in training and is absent at inference. k is the number of experts per token: a smaller
    k omits those with the smallest logits, and the softmax is over the remaining ones.
    """

    def __init__(self, dim: int, hidden: int, experts: int, k: int = 2) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.noise = nn.Linear(dim, experts, bias=False)
        self.trained_k = k

    def route(self, x: Tensor, ids: Tensor, k: int | None = None) -> Choice:
        """Returns the experts with the k largest logits."""
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        kept, index = logits.topk(self.trained_k if k is None else k, dim=-1)
        return index, kept.softmax(dim=-1)


class Switch(Mixture):
    """y = p_i · E_i(x), i the largest of p = softmax(x·W).

    "Switch transformers: scaling to trillion parameter models with simple and efficient sparsity",
    Fedus, Zoph and Shazeer, 2022. k is 1, as the paper proposes: there is no smaller k, and a
    larger one is no use, because a second expert was never trained to add to the first.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """Returns the most probable expert, with its probability."""
        best, index = self.gate(x).softmax(dim=-1).max(dim=-1, keepdim=True)
        return index, best


class GShard(Mixture):
    """y = Σ over two experts of g_i/(g_1 + g_2) · E_i(x), as long as the expert has seats.

    "GShard: scaling giant models with conditional computation and automatic sharding", Lepikhin et
    al., 2021, Algorithm 1: in a group of m tokens, here a sequence, an expert has C seats; the
    tokens' first choices take them in order, then their second choices, and a token that finds none
    gets nothing from that expert. (In training, second choices are also dropped at random.) k is 2:
    the two weights are divided by their sum, so one expert alone would be a different model.
    """

    def __init__(self, dim: int, hidden: int, experts: int, seats: float = 2.0) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.seats = seats

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """Returns the experts with the two largest gates; without a seat, the weight is 0."""
        gates = self.gate(x).softmax(dim=-1)
        n = gates.shape[-1]
        capacity = math.ceil(self.seats * x.shape[1] / n)
        best, index = gates.topk(2, dim=-1)
        first, second = F.one_hot(index[..., 0], n), F.one_hot(index[..., 1], n)  # (b, m, n)
        taken = first.sum(dim=1, keepdim=True)  # the first choices of all tokens
        seat = torch.stack(
            [
                (first.cumsum(dim=1) * first).sum(dim=-1),
                ((taken + second.cumsum(dim=1)) * second).sum(dim=-1),
            ],
            dim=-1,
        )
        weights = best / best.sum(dim=-1, keepdim=True)
        return index, weights * (seat <= capacity)


class Base(Mixture):
    """y = sigmoid(x·w_a) · E_a(x), a the expert with the largest x·w_a.

    "BASE layers: simplifying training of large, sparse models", Lewis, Bhosale, Dettmers, Goyal and
    Zettlemoyer, 2021. In training, a balanced assignment of a batch's tokens determines a; at
    inference, each token takes its best expert. k is 1: one expert per token, weighted by the
    sigmoid.
    """

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__(dim, hidden, experts)
        self.embeddings = nn.Parameter(torch.randn(experts, dim) / dim**0.5)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """Returns the expert with the nearest embedding."""
        score, index = (x @ self.embeddings.T).max(dim=-1, keepdim=True)
        return index, score.sigmoid()


class Hash(Mixture):
    """y = E_h(x), h the expert that a fixed table assigns to the token's word.

    "Hash layers for large sparse models", Roller, Sukhbaatar, Szlam and Weston, 2021: nothing is
    learned or ranked. There is no k: a word has one expert, and there is no second choice.
    """

    table: Tensor

    def __init__(self, dim: int, hidden: int, experts: int, words: int) -> None:
        super().__init__(dim, hidden, experts)
        self.register_buffer("table", torch.randperm(words) % experts)

    def route(self, x: Tensor, ids: Tensor) -> Choice:
        """Returns the word's expert, with the weight 1."""
        index = self.table[ids].unsqueeze(-1)
        return index, torch.ones_like(index, dtype=x.dtype)


class ExpertChoice(nn.Module):
    """y = Σ of G·E(x) over the experts that chose x: each expert takes its c best tokens.

    "Mixture-of-experts with expert choice routing", Zhou et al., 2022: S = softmax(x·W) over the
    experts; an expert takes the c = m·f/n tokens of a sequence with the largest S, and any number
    of experts may choose a token. There is no k: f, the mean number of experts per token, sets c.

    No router selects k experts for a token, so the adapter describes only the bank, which is
    called with rows and experts; the selection remains the network's own code.
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
        gates, token = scores.topk(max(1, int(m * self.mean / n)), dim=-1)  # (b, n, c)
        token = token.flatten(1).unsqueeze(-1).expand(-1, -1, d)  # (b, n·c, d)
        expert = torch.arange(n).view(1, n, 1).expand_as(gates).reshape(b, -1, 1)
        rows = self.bank(x.gather(1, token), expert, gates.reshape(b, -1, 1))
        return torch.zeros_like(x).scatter_add(1, token, rows)


class Hierarchical(Mixture):
    """y = Σ_i Σ_j G(x)_i · G_i(x)_j · E_ij(x): one gate over groups, and one within each group.

    Shazeer et al., 2017, appendix B; the tree of gates is that of "Hierarchical mixtures of experts
    and the EM algorithm", Jordan and Jacobs, 1994. Each gate is the softmax of its largest logits.
    k is the number of experts over both levels: if k is even, k/2 in each of the two best groups,
    otherwise all k in the best group.
    """

    def __init__(self, dim: int, hidden: int, experts: int, groups: int = 4, k: int = 4) -> None:
        super().__init__(dim, hidden, experts)
        self.gate = nn.Linear(dim, groups, bias=False)
        self.gates = nn.Linear(dim, experts, bias=False)
        self.groups, self.trained_k = groups, k

    def route(self, x: Tensor, ids: Tensor, k: int | None = None) -> Choice:
        """Returns the best experts of the best groups, weighted by the product of both gates."""
        k = self.trained_k if k is None else k
        groups = 2 if k % 2 == 0 else 1
        kept, group = self.gate(x).topk(groups, dim=-1)  # (b, m, groups)
        logits = self.gates(x).unflatten(-1, (self.groups, -1))  # (b, m, all groups, each)
        own = logits.gather(2, group.unsqueeze(-1).expand(*group.shape, logits.shape[-1]))
        inner, member = own.topk(k // groups, dim=-1)
        weights = kept.softmax(dim=-1).unsqueeze(-1) * inner.softmax(dim=-1)
        index = group.unsqueeze(-1) * logits.shape[-1] + member
        return index.flatten(2), weights.flatten(2)


class Deep(nn.Module):
    """z = Σ_i g_i(x) · E_i(x), then y = Σ_j g'_j(z) · E'_j(z): two layers in sequence.

    "Learning factored representations in a deep mixture of experts", Eigen, Ranzato and Sutskever,
    2013: the second gate sees the output of the first layer, so pairs of experts are chosen.
    The paper mixes all experts of a layer; here, each layer has a top-k gate. k is set for
    each layer: `--k 2,1`.
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
    """A small network around a mixture, from words (b, m) to scores of words (b, m, words)."""

    def __init__(self, mixture: nn.Module, words: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.positions = nn.Parameter(torch.randn(LENGTH, dim) / 2)
        self.norm = nn.LayerNorm(dim)
        self.mixture = mixture
        self.head = nn.Linear(dim, words)

    def example_input(self) -> Tensor:
        """Returns an input on which moexport compares this network with its own copy of it."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.embed.num_embeddings, (4, LENGTH), generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the scores."""
        x = self.embed(ids) + self.positions
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
    """Returns the network with random weights, for --weights to replace; --set sets `mixture`."""
    torch.manual_seed(0)
    return Words(MIXTURES[mixture](dim, hidden, experts), WORDS, dim)
