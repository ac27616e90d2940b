"""The contract of a kind of MoE layer: what Soft MoE and muMoE offer, and any further kind must.

A kind is one file beside this one: a spec (`MoESpec`: sizes, behaviour, what it costs and chooses),
a PyTorch module (`MoELayer`: the reference, its choices and its stored weights), and a record of
its lowerings (`lowerings.KINDS`). Tracing, planning, writing weights and checking go through the
names of this module.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..rewrites import Rewrite

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Steering:
    """An expert's cluster centre, its column of the gating matrix, added to every token.

    Times `strength`; where it is given at run time, times the number at `place` among the `count`
    numbers of each input.
    """

    level: int
    expert: int
    strength: float = 0.0
    place: int | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class LayerEdits:
    """The edits of one layer; without any it computes what it was trained to.

    `ablated` are pairs of a level, from 0, and an expert of it that contributes nothing. With
    several levels every combination that the expert takes part in contributes nothing.
    `steerings` move what the layer sees.
    """

    ablated: frozenset[tuple[int, int]] = frozenset()
    rewrites: tuple[Rewrite, ...] = field(default=())
    steerings: tuple[Steering, ...] = ()

    def ablated_in(self, level: int) -> tuple[int, ...]:
        """The experts of a level that contribute nothing, ascending."""
        return tuple(sorted(expert for at, expert in self.ablated if at == level))

    def present(self, level: int, experts: int, like: Tensor) -> Tensor:
        """Returns [n]: 0 for the ablated experts of a level and 1 for the others."""
        mask = torch.ones(experts, dtype=like.dtype, device=like.device)
        mask[list(self.ablated_in(level))] = 0
        return mask


NO_EDITS = LayerEdits()


Kind = str
"""What a spec and the record of the lowerings that serve it call their kind of layer: `soft-moe`,
`mumoe` or that of a plugin."""


def a_layer(kind: Kind) -> str:
    """A kind of layer with its article, for messages: "a soft-moe layer", "an experts layer"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} layer"


Algorithm = Literal["masked", "selected"]
"""How eager PyTorch applies Algorithm 1. `masked`: every expert runs, unselected columns of C are
zeroed. `selected`: a loop over experts that computes the inputs which selected each (the papers'
Algorithm 2). A muMoE layer knows the first alone."""


class MoESpec(Protocol):
    """Sizes of one layer of any kind.

    `kind` is which kind it is, `op_type` the type of its node in a traced graph (in the domain
    `ai.moexport`), `name` the layer's path in its model. `experts` is the largest k that leaves
    nothing out, `trained_k` how many experts are computed where nothing is left out that was
    trained, `levels` are the sizes of the expert modes (n alone, unless the layer has a
    hierarchy), `slots` is p (1 where a layer has none). `dim` is d, the width of a token, `hidden`
    h, that between a layer's two matmuls (0 where there is one), `out` o.

    `renormalizable`: the weights of the kept experts can be divided by their sum. `chooses_sets`:
    each input chooses a set of k experts, which eager PyTorch can loop over. `routes_tokens`: each
    token has a choice of its own; else all tokens of an input share one. `drops`: a capacity
    may leave a token out, whatever k is. `flat`: the router is part of the network around the
    layer, which takes the tokens of a whole batch as rows, and what was chosen for them.
    `typical_tokens` are numbers of tokens at once that a lowering is to be good for, whatever the
    batch; empty where a batch says it. `dynamic_int8`: INT8 products find the scales of their rows
    while a graph runs; else, and in Q/DQ form always, a calibration does. `rewritable`:
    coefficients mix the experts, by which outputs can be re-written (`Rewrite`).
    """

    @property
    def kind(self) -> Kind: ...
    @property
    def op_type(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def experts(self) -> int: ...
    @property
    def trained_k(self) -> int: ...
    @property
    def levels(self) -> tuple[int, ...]: ...
    @property
    def slots(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def out(self) -> int: ...
    @property
    def renormalizable(self) -> bool: ...
    @property
    def chooses_sets(self) -> bool: ...
    @property
    def routes_tokens(self) -> bool: ...
    @property
    def drops(self) -> bool: ...
    @property
    def flat(self) -> bool: ...
    @property
    def typical_tokens(self) -> tuple[int, ...]: ...
    @property
    def dynamic_int8(self) -> bool: ...
    @property
    def rewritable(self) -> bool: ...

    def macs(self, tokens: int, k: int) -> dict[str, int]:
        """Multiply-adds for one input of `tokens` tokens by part."""
        ...

    def bytes_read(self, k: int) -> int:
        """FP32 bytes of expert weights that a run with that k reads."""
        ...

    @property
    def quantized_parts(self) -> frozenset[str]:
        """The parts of `macs` that INT8 makes integer products."""
        ...

    def quantized_bytes(self, k: int) -> int:
        """FP32 bytes of those weights of `bytes_read` that INT8 stores as bytes."""
        ...

    def choices(self) -> dict[str, str]:
        """Names of what a lowered layer chose, by whose choice it is: both within the layer."""
        ...


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """What a layer chose for a batch, to compare with what a graph chose.

    `chosen` holds either the indices of the kept experts, int64 [b, k], ascending, or the weights
    of all experts after the choice, float32 [b, m, n]. `margin` [b] or [b, m] is the distance from
    the last one kept to the next, relative to the former; infinite where nothing was left out.
    `scores` [b, n] are what an input's experts were ranked by, where a layer ranks them per input.
    """

    chosen: Tensor
    margin: Tensor
    scores: Tensor | None = None


def _float32() -> ir.DataType:
    """The element type; imported here, as who only looks at a layer needs nothing of ONNX."""
    from onnx_ir import DataType

    return DataType.FLOAT


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A weight as a bundle stores it: its name, its shape, and its values in consecutive parts.

    `dtype` is what the values are stored as; the parts may come in another type, but for those of
    four bits, which come as the bytes that hold two each.
    """

    name: str
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]
    dtype: ir.DataType = field(default_factory=_float32)


class MoELayer(nn.Module, ABC):
    """A MoE layer in PyTorch, (b, m, d) to (b, m, o).

    A kind whose choice is made by the network around it works on rows, (t, d) to (t, o), and takes
    what was chosen as further inputs: those of its node in the graph.

    `keep` is k; None computes all experts, as the model was trained. `renormalize` and `algorithm`
    say how k is applied, where the kind gives a choice. `edits` change what the experts contribute,
    in `forward` and in what is `stored`, and never what is chosen.
    """

    spec: MoESpec

    def __init__(self) -> None:
        super().__init__()
        self.keep: int | None = None
        self.renormalize = False
        self.algorithm: Algorithm = "masked"
        self.edits = NO_EDITS
        self.strengths: Tensor | None = None
        """The strengths [b, s] that are given at run time, while the model runs."""

    def tokens(self, x: Tensor) -> Tensor:
        """Returns an input as the layer's node takes it: [b, m, d]."""
        return x

    @abstractmethod
    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Maps tokens x [b, m, d] to [b, m, o], as the published code does."""

    @abstractmethod
    def choices(self, *inputs: Any, **named: Any) -> dict[str, RoutingDecision]:
        """Returns what the layer chooses for its inputs, by the names of `MoESpec.choices`."""

    @abstractmethod
    def stored(self) -> Iterator[StoredPart]:
        """Yields the weights as the lowerings of this kind find them (`LayerTensors`)."""

    def with_experts(
        self, experts: Sequence[int], constants: np.ndarray | None = None
    ) -> MoELayer | None:
        """Returns the layer with some of its experts, ascending; None where none can be dropped.

        `constants` [n − e, p, o] are what the slots of the others give, None for nothing.
        """
        del experts, constants
        return None


def to_bfloat16(x: Tensor) -> Tensor:
    """Returns x rounded to BF16, in its own type."""
    return x.to(torch.bfloat16).to(x.dtype)


Matrices = Tensor | tuple[Tensor, ...]
"""n matrices of one shape: stacked in one tensor [n, in, out], or one tensor [in, out] each.

They may be transposed views of what a checkpoint holds; nothing is copied to change the layout.
"""


def frozen(tensor: Tensor) -> nn.Parameter:
    """Returns a tensor as a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def frozen_if_any(tensor: Tensor | None) -> nn.Parameter | None:
    """Returns the same for a weight that a layer may lack."""
    return None if tensor is None else frozen(tensor)


def frozen_matrices(matrices: Matrices) -> nn.Parameter | nn.ParameterList:
    """Returns matrices as parameters that are not trained."""
    if isinstance(matrices, Tensor):
        return frozen(matrices)
    return nn.ParameterList([frozen(matrix) for matrix in matrices])


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers of a model by module path, in module order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}


@contextmanager
def replaced_layers(
    module: nn.Module, stand_in: Callable[[str, MoELayer], nn.Module]
) -> Iterator[nn.Module]:
    """Within the context every MoE layer of a module gives its place to `stand_in(name, layer)`."""
    stand_ins = {id(layer): stand_in(name, layer) for name, layer in moe_layers(module).items()}
    places = [  # a network may hold a layer under several names, and call it by any
        (path, layer)
        for path, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, MoELayer)
    ]
    try:
        for path, layer in places:
            module.set_submodule(path, stand_ins[id(layer)])
        yield module
    finally:
        for path, layer in places:
            module.set_submodule(path, layer)


def sharing_weights(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that holds the same parameters and buffers, not copies of them."""
    # In the memo of a deep copy every tensor stands for itself, so that none is copied.
    memo = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)


def choice_key(layer: str, choice: str) -> str:
    """Returns the name of a layer's choice in a whole model: the layer's own for its only one."""
    return f"{layer} {choice}" if choice else layer


@contextmanager
def algorithm_1(
    model: nn.Module,
    keep: dict[str, int],
    *,
    renormalize: bool = False,
    algorithm: Algorithm = "masked",
) -> Iterator[None]:
    """Within the context each layer named in `keep` computes with its k; restored after."""
    layers = moe_layers(model)
    before = {name: (m.keep, m.renormalize, m.algorithm) for name, m in layers.items()}
    try:
        for name, k in keep.items():
            layers[name].keep = k
            layers[name].renormalize = renormalize
            layers[name].algorithm = algorithm
        yield
    finally:
        for name, m in layers.items():
            m.keep, m.renormalize, m.algorithm = before[name]


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[dict[str, RoutingDecision]]:
    """Within the context, each forward writes every layer's choices, by `choice_key`."""
    records: dict[str, RoutingDecision] = {}

    def record(module: nn.Module, args: tuple[Tensor, ...], _: Tensor, name: str) -> None:
        assert isinstance(module, MoELayer)
        for choice, made in module.choices(*args).items():
            records[choice_key(name, choice)] = made

    with ExitStack() as hooks:
        for name, layer in moe_layers(model).items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
        yield records
