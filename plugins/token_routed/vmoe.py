"""`vmoe-vit`: V-MoE and its ensembles, from google-research/vmoe.

Either a token goes to its k best experts, weighted by their softmax values, and an expert takes
tokens of a group up to its capacity and drops the other choices (Riquelme et al., 2021), or each
expert chooses its tokens. E3 gives every member of an ensemble its own experts (Allingham et al.,
2021): the tokens are repeated for each member before the first MoE layer.

The parameters do not contain a token's number of experts, the group size or the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, FamilyError
from ...exporter.families.base import (
    Config,
    Constructor,
    Family,
    FamilyModel,
    PublishedLayer,
    Question,
    Tensors,
    TensorShape,
    check_tensors,
    number_above_zero,
    prefixed,
    under,
    whole_number,
)
from ...exporter.families.vmoe import FIRST, SECOND
from ...exporter.families.vmoe_vit import (
    CLASSIFIER,
    DEFAULTS,
    DISPATCHES,
    IMAGE_SIZE,
    IMAGES,
    POSITION_EMB,
    SHAPES,
    SOFT,
    TEMPERATURE,
    as_read,
    moe_prefixes,
    network_of,
    published,
    read_sizes,
    rounding_note,
    rounds,
    settled,
    tokens_of_image,
)
from ...graphs.layers.margins import GroupRouter
from .layers.experts import Experts, ExpertsSpec, ExpertsWeights
from .own_forward import Code, OwnForward, RouterHost

API = 1

NAME = "vmoe-vit"
KERNEL = "Router.dense.kernel"
TOKENS_CHOOSE, EXPERTS_CHOOSE = "TopExpertsPerItem", "TopItemsPerExpert"
"""Parts of the routers' names in the original code."""

# --- the routers -------------------------------------------------------------------------------


class TokensChoose(GroupRouter):
    """Chooses each token's k experts, within their capacities: x [b, m, d] to index and weights.

    With M members, b counts M rows for each image. A group is `group` tokens in the order of
    (image, token, member). Without capacities nothing is dropped.
    """

    def __init__(
        self, kernel: Tensor, k: int, group: int, capacities: tuple[int, ...], *, priority: bool
    ) -> None:
        super().__init__()
        self.kernel = nn.Parameter(kernel, requires_grad=False)  # [M, d, n / M]
        self.k, self.group, self.capacities, self.priority = k, group, capacities, priority

    def forward(self, x: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns index and weights [b, m, k]; a dropped choice is expert + n with weight 0."""
        k = self.k if k is None else k
        ranked, order = self._ranked(x)
        weights, index = ranked[..., :k], order[..., :k]
        if self.capacities:
            position = self._in_rows(
                self._queue_positions(self._by_group(order), self._by_group(ranked), k), x
            )
            dropped = position > self.capacities[k - 1]
            index = torch.where(dropped, index + self._experts, index)
            weights = torch.where(dropped, torch.zeros_like(weights), weights)
        return index, weights

    def margin(self, x: Tensor, k: int | None = None) -> Tensor:
        """Returns the margin of each token's choices and drops, [b, m].

        Whether a choice is dropped depends on its position in a queue, which shifts by one if a
        token enters or leaves the queue. If c such tokens would change the outcome, the margin is
        the c-th smallest of their gaps.
        """
        k = self.k if k is None else k
        ranked, order = self._ranked(x)
        padded = torch.cat((ranked, torch.full_like(ranked[..., :1], -torch.inf)), dim=-1)
        gaps = (padded[..., :k] - padded[..., 1 : k + 1]) / ranked[..., :1]
        if not self.capacities:
            return gaps[..., -1]
        ranked, order, gaps = (self._by_group(array) for array in (ranked, order, gaps))
        index, margin = order[..., :k], gaps.amin(dim=-1)  # [G, S, k] and [G, S]
        excess = self._queue_positions(order, ranked, k) - self.capacities[k - 1]
        crossings = torch.where(excess > 0, excess, 1 - excess).clamp(max=self.group + 1)
        to_queue = self._gaps_to_queue(order, gaps)
        for choice in range(k):
            expert = index[..., choice, None]
            others = to_queue.transpose(1, 2).gather(1, expert.expand(-1, -1, self.group))
            if self.priority:  # or a token with the same choice moves before or after it
                first = ranked[..., 0]
                distance = (first[:, :, None] - first[:, None, :]).abs() / first[:, :, None]
                distance = distance.masked_fill(expert != expert.transpose(1, 2), torch.inf)
                distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
                others = torch.minimum(others, distance)
            smallest_gaps = nn.functional.pad(others.sort(dim=-1).values, (0, 1), value=torch.inf)
            moved = smallest_gaps.gather(-1, crossings[..., choice, None] - 1)[..., 0]
            margin = torch.minimum(margin, moved)
        return self._in_rows(margin[..., None], x)[..., 0]

    def _gaps_to_queue(self, order: Tensor, gaps: Tensor) -> Tensor:
        """Returns the smallest gap to move a token into or out of an expert's queue, [G, S, n]."""
        smallest_gaps = torch.full((*order.shape[:2], self._experts), torch.inf, dtype=gaps.dtype)
        last = order.shape[-1] - 1
        for choice, gap in enumerate(part[..., None] for part in gaps.unbind(-1)):
            for position in (choice, min(choice + 1, last)):
                expert = order[..., position, None]
                smallest_gaps = smallest_gaps.scatter_reduce(2, expert, gap, "amin")
        return smallest_gaps

    @property
    def _experts(self) -> int:
        """The number of experts of all members, n."""
        return self.kernel.shape[0] * self.kernel.shape[2]

    def _ranked(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each token's weights, descending, and their experts, [b, m, n / M].

        Of two experts with equal weights the one with the lower number comes first, as in JAX.
        """
        members, _, per_member = self.kernel.shape
        if members == 1:
            gates = (x @ self.kernel[0]).softmax(dim=-1)
            return gates.sort(dim=-1, descending=True, stable=True)
        by_member = x.reshape(-1, members, *x.shape[1:])
        gates = (by_member @ self.kernel).softmax(dim=-1)
        ranked, order = gates.sort(dim=-1, descending=True, stable=True)
        order = order + per_member * torch.arange(members)[:, None, None]
        return ranked.flatten(0, 1), order.flatten(0, 1)

    def _by_group(self, rows: Tensor) -> Tensor:
        """Returns values [b, m, j] as groups [G, S, j]."""
        members = self.kernel.shape[0]
        if members > 1:
            rows = rows.reshape(-1, members, *rows.shape[1:]).transpose(1, 2)  # [images, m, M, j]
        return rows.reshape(-1, self.group, rows.shape[-1])

    def _in_rows(self, groups: Tensor, x: Tensor) -> Tensor:
        """Returns values [G, S, j] as [b, m, j], the rows of x."""
        members, tokens = self.kernel.shape[0], x.shape[1]
        if members > 1:
            groups = groups.reshape(-1, tokens, members, groups.shape[-1]).transpose(1, 2)
        return groups.reshape(-1, tokens, groups.shape[-1])

    def _queue_positions(self, experts: Tensor, ranked: Tensor, k: int) -> Tensor:
        """Returns the position of each choice [G, S, k] in its expert's queue, counted from 1.

        `experts` [G, S, n / M] are sorted by their weights, `ranked`. The first choices of all
        tokens of a group come before all second ones. Within the first or second choices the tokens
        are in order, or sorted by their largest weight.
        """
        order = None
        if self.priority:
            order = ranked[..., 0].sort(dim=1, descending=True, stable=True).indices[..., None]
            # Cut to k only after the gather: OpenVINO would move an earlier cut before the gather,
            # but only that of its data.
            experts = experts.gather(1, order.expand_as(experts))
            order = order.expand(-1, -1, k)
        index = experts[..., :k]
        queue = index.transpose(1, 2).reshape(-1, k * self.group, 1)
        one_hot = (queue == torch.arange(self._experts)).to(torch.int64)  # [G, k·S, n]
        position = (one_hot.cumsum(dim=1) * one_hot).sum(dim=-1)
        position = position.reshape(-1, k, self.group).transpose(1, 2)
        return position if order is None else torch.zeros_like(position).scatter(1, order, position)


class ExpertsChoose(GroupRouter):
    """Chooses each expert's `capacity` best tokens of a group: x [b, m, d] to index and weights."""

    def __init__(self, kernel: Tensor, group: int, capacity: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(kernel, requires_grad=False)  # [d, n]
        self.group, self.capacity = group, capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns index and weights [b, m, n]: e, or e + n with weight 0 if e rejects the token."""
        n = self.kernel.shape[1]
        gates = (x @ self.kernel).softmax(dim=-1)
        chosen = self._chosen(gates).reshape(-1, x.shape[1], n)
        experts = torch.arange(n)
        index = torch.where(chosen, experts, experts + n)
        return index, torch.where(chosen, gates, torch.zeros_like(gates))

    def margin(self, x: Tensor, k: int | None = None) -> Tensor:
        """Returns how close each expert's decision on a token is, [b, m, n]."""
        del k
        gates = (x @ self.kernel).softmax(dim=-1)
        if self.capacity == self.group:
            return torch.full_like(gates, torch.inf)
        by_group = gates.reshape(-1, self.group, gates.shape[-1])
        best = by_group.topk(self.capacity + 1, dim=1).values
        last, next_ = best[:, -2:-1], best[:, -1:]
        gap = torch.where(self._chosen(gates), by_group - next_, last - by_group) / last
        return gap.reshape(gates.shape)

    def _chosen(self, gates: Tensor) -> Tensor:
        """Returns whether each expert takes each token of a group, [G, S, n]."""
        by_group = gates.reshape(-1, self.group, gates.shape[-1])
        order = by_group.sort(dim=1, descending=True, stable=True).indices
        rank = torch.arange(self.group)[None, :, None].expand_as(order)
        return torch.zeros_like(order).scatter(1, order, rank) < self.capacity


# --- the layer ---------------------------------------------------------------------------------


def _shapes(tensors: Tensors) -> dict[str, TensorShape]:
    kernel, first = tensors.get(KERNEL), tensors.get(f"{FIRST}.kernel")
    if kernel is None or kernel.ndim not in (2, 3) or first is None or first.ndim != 3:
        raise CheckpointError(f"not the weights of a {NAME} model: no experts next to {KERNEL}")
    n, d, h = first.shape
    members = kernel.shape[1] if kernel.ndim == 3 else 1
    return {
        KERNEL: (d, n) if kernel.ndim == 2 else (d, members, n // max(1, members)),
        f"{FIRST}.kernel": (n, d, h),
        f"{FIRST}.bias": (n, h),
        f"{SECOND}.kernel": (n, h, d),
        f"{SECOND}.bias": (n, d),
    }


def _make(prefix: str, tensors: Tensors, name: str) -> Experts:
    """Returns the experts of one layer, for which k and the groups are not set yet."""
    local = under(tensors, prefix)
    check_tensors(NAME, prefixed(local, prefix), prefixed(_shapes(local), prefix))
    w1, w2 = local[f"{FIRST}.kernel"], local[f"{SECOND}.kernel"]
    b1, b2 = local[f"{FIRST}.bias"], local[f"{SECOND}.bias"]
    n, d, h = w1.shape
    spec = ExpertsSpec(name, n, 1, dim=d, hidden=h, out=d, activation="gelu-tanh", gate="none")
    return Experts(spec, ExpertsWeights(w1=w1, w2=w2, b1=b1, b2=b2))


LAYER = PublishedLayer(
    family=NAME,
    mark=KERNEL,
    match=lambda tensors: f"{FIRST}.kernel" in tensors,
    make=_make,
    title="V-MoE",
)

# --- the configuration -------------------------------------------------------------------------

QUESTIONS = {
    "classifier": CLASSIFIER,
    "position_emb": POSITION_EMB,
    "image_size": IMAGE_SIZE,
    "router": Question(
        DEFAULTS["router"], f"or Noisy{EXPERTS_CHOOSE}Router, which has the same parameters"
    ),
    "num_selected_experts": Question(2, "the number of experts of a token", fits=False),
    "group_size": Question(
        197,
        "the number of tokens that are routed together: those of one image, or of a training batch",
        fits=False,
    ),
    "capacity_factor": Question(
        1.05,
        "the capacity of an expert in a group, relative to an equal share; null for no limit",
        fits=False,
    ),
    "capacity_multiple_of": Question(4, "the capacity is raised to a multiple of this number"),
    "batch_priority": Question(
        False, "whether experts take the tokens with the largest weights first", fits=False
    ),
    "ensemble_size": Question(1, "the number of members of an E3 ensemble"),
}

CONSTRUCTOR = Constructor(
    family=NAME,
    shapes=dict.fromkeys(SHAPES, ...),
    questions=QUESTIONS,
    free={
        "temperature": TEMPERATURE,
        "capacity": None,
        "capacity_ceil_or_round": "ceil",
        "ensemble": "members",
        "dispatch": DISPATCHES[0],
    },
    write=as_read,
)


def _questions(settings: Config, read: Config, tokens: int | None) -> dict[str, Question]:
    """Returns the questions that the settings leave open, with examples that fit the shapes."""
    members = read.get("ensemble_size", 1)
    selected = replace(
        QUESTIONS["num_selected_experts"], value=min(2, read["num_experts"] // members)
    )
    group = replace(QUESTIONS["group_size"], value=(tokens or 1) * members)
    questions = QUESTIONS | {"num_selected_experts": selected, "group_size": group}
    unlimited = "capacity_factor" in settings and settings["capacity_factor"] is None
    if settings.get("capacity") is not None:
        del questions["capacity_factor"]
    elif unlimited:  # without a capacity the groups have no effect
        for key in ("group_size", "capacity_multiple_of", "batch_priority"):
            del questions[key]
    if EXPERTS_CHOOSE in str(settings.get("router")):
        questions.pop("num_selected_experts")
        questions.pop("batch_priority", None)
    return questions


def capacity_of(choices: int, experts: int, config: Config) -> int:
    """Returns an expert's capacity if all experts together are to take `choices` choices.

    Raises FamilyError for a factor that leaves no slot.
    """
    if config["capacity"] is not None:
        return whole_number(NAME, "capacity", config["capacity"])
    factor = number_above_zero(NAME, "capacity_factor", config["capacity_factor"])
    rounding: Callable[[float], int] = math.ceil
    if config["capacity_ceil_or_round"] == "round":
        rounding = round
    elif config["capacity_ceil_or_round"] != "ceil":
        raise FamilyError(
            f"{NAME}: capacity_ceil_or_round={config['capacity_ceil_or_round']} is neither ceil "
            "nor round"
        )
    capacity = rounding(choices * factor / experts)
    if capacity < 1:
        raise FamilyError(f"{NAME}: capacity_factor={factor} leaves an expert no slot")
    multiple = config["capacity_multiple_of"]
    if not multiple:
        return capacity
    multiple = whole_number(NAME, "capacity_multiple_of", multiple)
    return capacity + -capacity % multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRouting:
    """How the layers of one model route.

    `k` is the number of experts of a token, in each of `members` of an ensemble. `group` tokens, of
    `images` images, are routed together, so a batch must be a multiple of `images`. `capacities`
    are the numbers of tokens that an expert takes per group, by k; empty if there is no limit.
    """

    experts: int
    members: int
    k: int
    group: int
    images: int
    capacities: tuple[int, ...]
    priority: bool
    experts_choose: bool

    @classmethod
    def of(cls, config: Config, tokens: int) -> GroupRouting:
        """Reads a configuration; raises FamilyError for an invalid one."""
        n, router = config["num_experts"], str(config["router"])
        members = whole_number(NAME, "ensemble_size", config["ensemble_size"])
        experts_choose = EXPERTS_CHOOSE in router
        if not experts_choose and TOKENS_CHOOSE not in router:
            raise FamilyError(
                f"{NAME}: router={router} is not supported",
                hint=f"supported are Noisy{TOKENS_CHOOSE}Router and Noisy{EXPERTS_CHOOSE}Router",
            )
        k = n
        if not experts_choose:
            k = whole_number(NAME, "num_selected_experts", config["num_selected_experts"])
        if n % members or k > n // members or (experts_choose and members > 1):
            raise FamilyError(
                f"{NAME}: ensemble_size={members} and num_selected_experts={k} do not fit "
                f"{n} experts",
                hint="use the values that the model was trained with",
            )
        if config["ensemble"] not in ("members", "mean"):
            raise FamilyError(f"{NAME}: ensemble={config['ensemble']} is neither members nor mean")
        priority = config.get("batch_priority", False)
        if not isinstance(priority, bool):
            raise FamilyError(f"{NAME}: batch_priority={priority} is neither true nor false")
        image = tokens * members
        capacities: tuple[int, ...] = ()
        if config.get("capacity_factor") is None and config["capacity"] is None:
            if experts_choose:
                raise FamilyError(f"{NAME}: without a capacity each expert would choose all tokens")
            group, images = image, 1
        else:
            group = whole_number(NAME, "group_size", config["group_size"])
            images = group // math.gcd(group, image)
            choice_counts = [group] * n if experts_choose else [group * i for i in range(1, n + 1)]
            capacities = tuple(
                min(group, capacity_of(choices, n, config)) for choices in choice_counts
            )
        if members > 1 and group % image:
            raise FamilyError(
                f"{NAME}: group_size={group} is not a multiple of {image}, the tokens of all "
                "members of an image"
            )
        return cls(
            experts=n,
            members=members,
            k=k,
            group=group,
            images=images,
            capacities=capacities,
            priority=priority,
            experts_choose=experts_choose,
        )

    def layer(self, experts: Experts, kernel: Tensor) -> OwnForward:
        """Returns one layer: its experts behind their router, whose kernel is [d, n]."""
        experts.spec = replace(experts.spec, k=self.k)
        if self.capacities:
            experts.spec = replace(experts.spec, group=self.group, capacities=self.capacities)
        router: TokensChoose | ExpertsChoose
        if self.experts_choose:
            router = ExpertsChoose(kernel, self.group, self.capacities[0])
        else:
            columns = kernel.reshape(-1, self.members, self.experts // self.members)
            router = TokensChoose(
                columns.transpose(0, 1), self.k, self.group, self.capacities, priority=self.priority
            )
        router.layer = experts.spec.name
        return OwnForward(experts, Code(None, router), router)

    @property
    def note(self) -> str:
        """A sentence on the groups of tokens that are routed together and on dropped choices."""
        if not self.capacities:
            return "the experts have no capacity limit, so no choice of a token is dropped"
        images = "one image" if self.images == 1 else f"{self.images} images"
        tokens = f"{self.capacities[self.k - 1]} of the {self.group} tokens of {images}"
        sentence = f"an expert takes at most {tokens} and drops the others that chose it"
        if self.experts_choose:
            sentence = f"an expert chooses {tokens}"
        if self.images == 1:
            return sentence
        return (
            f"{sentence}, so an output depends on the other images in its group and on its "
            f"position among them, and the batch size must be a multiple of {self.images}"
        )


def _build(tensors: Tensors, settings: Config) -> FamilyModel:
    prefixes = moe_prefixes(tensors, KERNEL)
    experts = {
        number: LAYER.make(prefix, tensors, f"blocks.{number}.mlp.experts")
        for number, prefix in prefixes.items()
    }
    read = read_sizes(NAME, tensors, experts)
    kernels = {number: tensors[prefix + KERNEL] for number, prefix in prefixes.items()}
    first = next(iter(kernels.values()))
    if first.ndim == 3:
        read["ensemble_size"] = first.shape[1]
    if settings.get("capacity_factor") in ("none", "None"):
        settings = {**settings, "capacity_factor": None}
    questions = _questions(settings, read, tokens_of_image(tensors, read, settings))
    config, grid = settled(NAME, CONSTRUCTOR, tensors, settings, read, questions)
    routing = GroupRouting.of(config, math.prod(grid) + int("cls" in tensors))
    rounded = rounds(NAME, config)
    layers = {
        number: routing.layer(experts[number], kernel.flatten(1))
        for number, kernel in kernels.items()
    }
    for layer in experts.values():
        layer.spec = replace(layer.spec, rounded=rounded)
    module, (input_, output) = network_of(NAME, tensors, config, grid, layers)
    return FamilyModel(
        module=module,
        config=config,
        inputs=(replace(input_, groups_of=routing.images if routing.images > 1 else None),),
        outputs=(output,),
        notes=(IMAGES, routing.note, rounding_note(rounded=rounded)),
        rounded=rounded,
        host=RouterHost(),
    )


FAMILY = Family(
    name=NAME,
    options=CONSTRUCTOR.options,
    summary="V-MoE and its E3 ensembles, from JAX (google-research/vmoe)",
    detect=lambda tensors: "embedding.kernel" in tensors and bool(moe_prefixes(tensors, KERNEL)),
    build=_build,
    layer=LAYER,
    questions=tuple(QUESTIONS),
    published=lambda config: published(NAME, CONSTRUCTOR.options, config),
    after=SOFT,
)
