"""Counts how often each expert is chosen, by class and layer, and how evenly.

In a Soft MoE, Algorithm 1 chooses k experts for an input; with token-routed experts, a router
chooses experts for a token. f_e is the share of the tokens for which expert e is chosen, before a
capacity drops any, and P_e the mean of its probability in the router: E · Σ f_e P_e is the balance
loss of the Switch Transformer, which is k if all experts are used equally. If all experts are kept,
nothing is chosen, and only the mean gates show which experts matter: an expert's share of the
combine weights (Soft MoE), coefficients (muMoE) or weights (token-routed), over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ....bench.data import LabelledData
from ....bench.measure.answers import are_attributes
from ....common.console import Progress
from ....data.batches import IGNORED, Array, Labels
from ....errors import FeedError
from ....exporter.checks.choices import real_tokens
from ....exporter.inputs import completed
from ....exporter.job import export_job
from ....exporter.model import Model
from ....exporter.options import ExportOptions
from ....graphs.k import K
from ....graphs.layers.base import MoELayer, algorithm_1, moe_layers
from .router import RouterProbabilities

BATCH, BATCH_OF_TOKENS = 64, 8
"""The batch sizes; that for models of texts is smaller, because their outputs are large."""


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """The choices of `of` inputs or tokens of a class, attribute or subgroup."""

    group: int | bool | str
    of: int
    chosen: tuple[float, ...] | None
    gates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LayerUsage:
    """The use of the experts of a layer or of one of its levels.

    `chosen` [n] is the share of the `of` inputs or tokens (`chosen_by`) that choose each expert;
    each chooses `k`. It is None if every expert is always used. `gates` [n] are the mean gates. For
    routers of tokens (`routed`), `probabilities` [n] is P and `balance_loss` E·Σf·P; both are None
    if the router's probabilities are unknown. For experts with a capacity, `overflow` [n] is the
    dropped share of each expert's choices, None for an expert without choices, `dropped` that of
    all choices, and `uncomputed` the share of the tokens that no expert computes.
    """

    layer: str
    level: int
    experts: int
    k: int
    chosen_by: str
    of: int
    chosen: tuple[float, ...] | None
    gates: tuple[float, ...]
    probabilities: tuple[float, ...] | None = None
    balance_loss: float | None = None
    overflow: tuple[float | None, ...] | None = None
    dropped: float | None = None
    uncomputed: float | None = None
    groups: tuple[GroupUsage, ...] = ()
    routed: bool = False

    @property
    def unused(self) -> tuple[int, ...]:
        return tuple(e for e, share in enumerate(self.chosen or ()) if share == 0)

    @property
    def shown(self) -> tuple[float, ...]:
        """The values to show: the shares of choices or, if nothing is chosen, the mean gates."""
        return self.gates if self.chosen is None else self.chosen


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of a model's experts for a number of `inputs`, by layer.

    `grouped_by` is the kind of groups: "class", "attribute", "subgroup", or empty without labels.
    """

    model: str
    family: str
    inputs: int
    grouped_by: str
    layers: tuple[LayerUsage, ...]


@dataclass(frozen=True, slots=True)
class Members:
    """Which inputs [s, g] or tokens [s, m, g] belong to each class, attribute or subgroup."""

    name: str
    values: tuple[int | bool | str, ...]
    members: Array

    @staticmethod
    def of(labels: Labels | None, subgroups: Array | None, tokens: int | None) -> Members:
        """Returns the members of each subgroup or, without subgroups, of each label."""
        name = ""
        values: Array = np.zeros(0)
        members: Array = np.zeros((0, 0), bool)
        if subgroups is not None:
            values = np.unique(subgroups)
            name, members = "subgroup", subgroups[:, None] == values
        elif labels is None:
            pass
        elif labels.dtype.kind in "iub" and (
            labels.ndim == 1 or (tokens is not None and labels.shape[1:] == (tokens,))
        ):
            values = np.unique(labels[labels != IGNORED])
            name, members = "class", labels[..., None] == values
        elif labels.ndim == 2 and are_attributes(labels):
            values = np.arange(labels.shape[1])
            name, members = "attribute", labels == 1
        return Members(name, tuple(value.item() for value in values), members)


class _LevelSums:
    """Sums over the tokens or inputs of one level of a layer."""

    def __init__(
        self, layer: MoELayer, level: int, k: int, groups: int, *, per_input: bool, by_experts: bool
    ) -> None:
        n = layer.spec.levels[level]
        self.layer, self.level, self.k = layer, level, min(k, n)
        self.per_input, self.by_experts = per_input, by_experts
        self.of = self.uncomputed = 0
        self.chosen, self.dropped, self.gates = np.zeros(n), np.zeros(n), np.zeros(n)
        self.probabilities: Array | None = np.zeros(n) if layer.spec.flat else None
        self.of_groups = np.zeros(groups)
        self.chosen_of, self.gates_of = np.zeros((groups, n)), np.zeros((groups, n))

    def add(self, choices: _Choices, members: Array, counted: Array | None) -> None:
        """Adds choices by group, `members` [s, g] or [s, m, g], of the tokens `counted` [s, m]."""
        rows = len(members)
        units = len(choices.chosen) // rows
        selected = np.ones(len(choices.chosen), bool)
        if counted is not None and counted.shape == (rows, units):
            selected = counted.reshape(-1)
        if members.ndim == 3 and members.shape[1] == units:
            member = members.reshape(-1, members.shape[-1])
        else:
            member = np.repeat(members.reshape(rows, -1), units, axis=0)
        member = member[selected].astype(np.float64)
        chosen, gates = choices.chosen[selected], choices.gates[selected]
        self.of += int(selected.sum())
        self.chosen += chosen.sum(axis=0)
        self.gates += gates.sum(axis=0)
        self.of_groups += member.sum(axis=0)
        self.chosen_of += member.T @ chosen
        self.gates_of += member.T @ gates
        dropped = choices.dropped[selected]
        self.dropped += dropped.sum(axis=0)
        self.uncomputed += int((dropped.sum(axis=1) >= chosen.sum(axis=1)).sum())
        if choices.probabilities is None:
            self.probabilities = None
        elif self.probabilities is not None:
            self.probabilities += choices.probabilities[selected].sum(axis=0)

    def usage(self, groups: Members) -> LayerUsage:
        """Returns the usage from the sums, without groups that have no members."""
        spec = self.layer.spec
        n = spec.levels[self.level]
        all_used = bool((self.chosen == self.of).all())
        losses = zip(self.dropped.tolist(), self.chosen.tolist(), strict=True)
        drops = (bool(self.dropped.any()) or spec.drops) and not self.by_experts
        shares = self.chosen / self.of
        p = None if self.probabilities is None else self.probabilities / self.of
        loss = None if p is None or self.by_experts else float(n * (shares * p).sum())
        by_group = tuple(
            GroupUsage(
                value,
                int(of),
                None if all_used else tuple((chosen / of).tolist()),
                tuple((gates / of).tolist()),
            )
            for value, of, chosen, gates in zip(
                groups.values, self.of_groups, self.chosen_of, self.gates_of, strict=True
            )
            if of
        )
        return LayerUsage(
            layer=spec.name,
            level=self.level + 1,
            experts=n,
            k=self.k,
            chosen_by="inputs" if self.per_input else "tokens",
            of=self.of,
            chosen=None if all_used else tuple(shares.tolist()),
            gates=tuple((self.gates / self.of).tolist()),
            probabilities=None if p is None else tuple(p.tolist()),
            balance_loss=loss,
            overflow=tuple(lost / of if of else None for lost, of in losses) if drops else None,
            dropped=float(self.dropped.sum() / max(1, self.chosen.sum())) if drops else None,
            uncomputed=self.uncomputed / self.of if drops or self.by_experts else None,
            groups=by_group,
            routed=spec.flat,
        )


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices of each input or token: whether each expert was chosen or dropped, and its gate.

    All arrays are [u, n] for u inputs or tokens. With `by_experts`, experts chose their tokens.
    """

    chosen: Array
    gates: Array
    dropped: Array
    probabilities: Array | None = None
    by_experts: bool = False


def usage_of(
    model: Model,
    data: LabelledData,
    *,
    k: K | None = None,
    subgroups: Array | None = None,
    progress: Progress,
) -> Usage:
    """Returns how the experts of every layer are used for the inputs in the data.

    `k` is as in an export, by default that of training. Counts are by class, attribute or, if
    given, subgroup. Raises `UsageError` for an invalid k, `FeedError` for too few inputs.
    """
    model, ks = _with_k(model, k)
    tokens = data.inputs.shape[1] if model.host.per_token and data.inputs.ndim > 1 else None
    groups = Members.of(data.labels, subgroups, tokens)
    sums: dict[tuple[str, int], _LevelSums] = {}
    multiple = model.batch_of
    batch = BATCH_OF_TOKENS if model.host.per_token else BATCH
    size = multiple * max(1, batch // multiple)
    count = len(data) // multiple * multiple
    if not count:
        raise FeedError(
            f"the model computes {multiple} inputs together, but the data have {len(data)}",
            hint=f"give at least {multiple} inputs",
        )
    progress.step(f"counting the experts that {model.source.path} uses", total=count)
    with (
        torch.inference_mode(),
        algorithm_1(model.module, ks),
        _recorded_choices(model.module) as recorded,
    ):
        for rows in data.batches(size, count):
            others = {name: array[rows] for name, array in data.others.items()}
            x = completed({data.input_name: data.inputs[rows], **others}, model.inputs)
            model.module(*(torch.from_numpy(np.array(x[spec.name])) for spec in model.inputs))
            inputs = rows.stop - rows.start
            members = groups.members[rows] if groups.values else np.zeros((inputs, 0), bool)
            for name, levels in recorded.items():
                layer = model.layers[name]
                for level, choices in enumerate(levels):
                    units, rest = divmod(len(choices.chosen), inputs)
                    if rest:  # tokens do not belong to single inputs of the network
                        continue
                    if (name, level) not in sums:
                        sums[name, level] = _LevelSums(
                            layer,
                            level,
                            ks[name],
                            members.shape[-1],
                            per_input=not layer.spec.routes_tokens and units == 1,
                            by_experts=choices.by_experts,
                        )
                    mask = real_tokens(x, inputs, units) if layer.spec.flat else None
                    sums[name, level].add(choices, members, mask)
            recorded.clear()
            progress.advance(inputs)
    layers = tuple(level.usage(groups) for level in sums.values() if level.of)
    return Usage(model.source.path, model.family, count, groups.name, layers)


def _with_k(model: Model, k: K | None) -> tuple[Model, dict[str, int]]:
    """Returns the model with the given k, and the k of each layer."""
    if k is None:
        return model, {name: layer.spec.trained_k for name, layer in model.layers.items()}
    job = export_job(model, ExportOptions(k=k, verify=False))
    ks = {name: value for name, value in job.k.items() if value is not None}
    return job.model, ks


@contextmanager
def _recorded_choices(module: nn.Module) -> Iterator[dict[str, Sequence[_Choices]]]:
    """Yields a dict with the latest choices of every layer, by level."""
    found: dict[str, Sequence[_Choices]] = {}
    layers = moe_layers(module)
    widths = frozenset(layer.spec.experts for layer in layers.values() if layer.spec.flat)
    with RouterProbabilities(widths) as probabilities, ExitStack() as hooks:

        def record(layer: nn.Module, args: tuple[Tensor, ...], name: str) -> None:
            assert isinstance(layer, MoELayer)
            if layer.spec.flat:
                p = probabilities.take(len(args[1]), layer.spec.experts)
                found[name] = [_routed(layer, args[1], args[2], p)]
            else:
                found[name] = list(_mixed(layer, args))

        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(record, name=name)))
        yield found


def _mixed(layer: MoELayer, args: tuple[Tensor, ...]) -> Iterator[_Choices]:
    """Yields, by level, the choices of a layer that mixes experts, for each token or input."""
    for choice in layer.choices(*args).values():
        if choice.scores is None:  # coefficients [b, m, n]
            gates = choice.chosen.double().flatten(0, -2).numpy()
            yield _Choices((gates != 0).astype(np.float64), gates, np.zeros_like(gates))
            continue
        gates = (choice.scores.double() / layer.tokens(args[0]).shape[1]).numpy()
        chosen = np.zeros_like(gates)
        np.put_along_axis(chosen, choice.chosen.numpy(), 1.0, axis=1)
        yield _Choices(chosen, gates, np.zeros_like(gates))


def _routed(
    layer: MoELayer, index: Tensor, weights: Tensor, probabilities: Array | None
) -> _Choices:
    """Returns the choices of a layer with a router for tokens, including dropped choices.

    The index of a dropped choice is expert + n; a token's only choice is also dropped if its weight
    is zero. If experts choose their tokens, expert + n is one that did not choose the token.
    """
    n = layer.spec.experts
    experts, lost, shares = (index % n).numpy(), (index >= n).numpy(), weights.double().numpy()
    if layer.spec.drops and index.shape[1] == n:
        order = experts.argsort(axis=1)
        chosen = 1.0 - np.take_along_axis(lost, order, axis=1)
        gates = np.take_along_axis(shares, order, axis=1)
        return _Choices(chosen, gates, np.zeros_like(gates), probabilities, by_experts=True)
    if index.shape[1] == 1 and probabilities is not None:
        zero = shares == 0
        best = probabilities.argmax(axis=1)[:, None]
        experts, lost = np.where(zero & ~lost, best, experts), lost | zero
    chosen, gates, dropped = (np.zeros((len(experts), n)) for _ in range(3))
    rows = np.arange(len(experts))[:, None]
    chosen[rows, experts] = 1.0
    dropped[rows, experts] = lost
    np.add.at(gates, (rows, experts), shares)
    return _Choices(chosen, gates, dropped, probabilities)
