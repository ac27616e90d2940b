"""The interface of a kind of MoE layer, which Soft MoE and muMoE implement.

A kind is one file in this folder, with a spec (`MoESpec`: sizes, behaviour, costs and choices) and
a PyTorch module (`MoELayer`: the reference, its choices and its stored weights), plus a record of
its lowerings (`lowerings.KINDS`). Tracing, planning, writing weights and checking use only the
names in this module.
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

from ..edits import NO_EDITS, Edits

if TYPE_CHECKING:
    import onnx_ir as ir


Kind = str
"""The name of a kind of layer: `soft-moe`, `mumoe` or one from a plugin."""


def kind_text(kind: Kind) -> str:
    """Returns a kind of layer with its article: "a soft-moe layer", "an experts layer"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} layer"


Algorithm = Literal["masked", "selected"]
"""How eager PyTorch applies Algorithm 1. `masked`: every expert runs, and unselected columns of C
are zeroed. `selected`: a loop over experts in which each computes only the inputs that selected it
(the meaning of the text on Algorithm 2 in the Soft MoE paper). muMoE layers support `masked`."""


class MoESpec(Protocol):
    """Sizes of one layer of any kind.

    `kind` names the kind, `op_type` is the type of its node in a traced graph (in the domain
    `ai.moexport`), and `name` is the layer's path in its model. `experts` is n, the k that keeps
    all experts, and `trained_k` is the number of experts that the trained model computes. `levels`
    are the sizes of the expert modes: only n, unless the layer has a hierarchy, which also has
    `kept`, the largest k of each level. `slots` is p (1 for layers without slots), `dim` is d, the
    width of a token, `hidden` is h, the width between two matmuls (0 if only one), and `out` is o.

    `renormalizable`: the weights of the kept experts can be divided by their sum. `chooses_sets`:
    each input chooses a set of k experts, over which eager PyTorch can loop. `routes_tokens`: each
    token has its own choice; otherwise the tokens of an input share one. `drops`: a capacity limit
    may drop a token at any k. `flat`: the router is outside the layer, whose inputs are the tokens
    of a whole batch as rows, and their choices. `typical_tokens` are numbers of tokens for which a
    lowering should be fast at every batch; empty if the batch determines them. `dynamic_int8`: INT8
    products compute the scales of their rows at run time; otherwise, and always in Q/DQ form, the
    scales come from a calibration. `rewritable`: coefficients mix the experts, so that outputs can
    be rewritten (`Rewrite`).
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
        """Returns the multiply-adds for one input of `tokens` tokens, by part."""
        ...

    def bytes_read(self, k: int) -> int:
        """Returns the FP32 bytes of the expert weights that a run with this k reads."""
        ...

    @property
    def quantized_parts(self) -> frozenset[str]:
        """The parts of `macs` that become integer products with INT8."""
        ...

    def quantized_bytes(self, k: int) -> int:
        """Returns the FP32 bytes of those weights in `bytes_read` that INT8 stores as bytes."""
        ...

    def choices(self) -> dict[str, str]:
        """Returns the names, within the layer, of the values with its choices, by choice."""
        ...


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The choices of a layer for a batch, to compare with those of a graph.

    `chosen` has either the indices of the kept experts, int64 [b, k], ascending, or the weights of
    all experts after the choice, float32 [b, m, n]. `margin` [b] or [b, m] is the distance from the
    last kept score to the next, relative to the former; infinite if all are kept. `scores` [b, n]
    rank the experts of an input, in layers that rank them per input.
    """

    chosen: Tensor
    margin: Tensor
    scores: Tensor | None = None


def _float32() -> ir.DataType:
    """Returns the element type; imported here, so that inspecting a layer does not import ONNX."""
    from onnx_ir import DataType

    return DataType.FLOAT


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A weight as stored in a bundle: its name, its shape, and its values in consecutive parts.

    The values are stored as `dtype`; parts may have another type, except for 4-bit values, whose
    parts are bytes with two values each.
    """

    name: str
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]
    dtype: ir.DataType = field(default_factory=_float32)


class MoELayer(nn.Module, ABC):
    """A MoE layer in PyTorch, (b, m, d) to (b, m, o).

    If the surrounding network makes the choice, the layer maps rows (t, d) to (t, o) and reads
    the choice from additional inputs, like its node in the graph.

    `keep` is k; None computes all experts, as in the trained model. `renormalize` and `algorithm`
    select how k is applied, if the kind supports both. `edits` change the experts' contributions,
    in `forward` and in `stored`, but never the choice.
    """

    spec: MoESpec

    def __init__(self) -> None:
        super().__init__()
        self.keep: int | None = None
        self.renormalize = False
        self.algorithm: Algorithm = "masked"
        self.edits: Edits = NO_EDITS
        self.strengths: Tensor | None = None
        """The strengths [b, s] of steerings at run time, during a forward pass."""

    def tokens(self, x: Tensor) -> Tensor:
        """Returns an input in the shape that the layer's node expects: [b, m, d]."""
        return x

    @abstractmethod
    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Maps tokens x [b, m, d] to [b, m, o], as the published code does."""

    @abstractmethod
    def choices(self, *inputs: Any, **named: Any) -> dict[str, RoutingDecision]:
        """Returns the layer's choices for its inputs, by the names in `MoESpec.choices`."""

    @abstractmethod
    def stored(self) -> Iterator[StoredPart]:
        """Yields the weights in the form that the kind's lowerings expect (`LayerTensors`)."""

    def with_experts(
        self, experts: Sequence[int], constants: np.ndarray | None = None
    ) -> MoELayer | None:
        """Returns the layer with some of its experts, ascending; None if it cannot drop experts.

        `constants` [n − e, p, o] are the outputs of the dropped experts' slots, None for zeros.
        """
        return None


def to_bfloat16(x: Tensor) -> Tensor:
    """Returns x rounded to BF16, in the type of x."""
    return x.to(torch.bfloat16).to(x.dtype)


Matrices = Tensor | tuple[Tensor, ...]
"""n matrices of one shape: stacked in one tensor [n, in, out], or one tensor [in, out] each.

They may be transposed views of a checkpoint's tensors; nothing is copied to change the layout.
"""


def frozen(tensor: Tensor) -> nn.Parameter:
    """Returns a tensor as a parameter without gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def frozen_if_any(tensor: Tensor | None) -> nn.Parameter | None:
    """Returns an optional weight as a parameter without gradient."""
    return None if tensor is None else frozen(tensor)


def frozen_matrices(matrices: Matrices) -> nn.Parameter | nn.ParameterList:
    """Returns matrices as parameters without gradients."""
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
    """Within the context, `stand_in(name, layer)` replaces every MoE layer of a module."""
    stand_ins = {id(layer): stand_in(name, layer) for name, layer in moe_layers(module).items()}
    locations = [  # a network may have a layer under several names, and call any of them
        (path, layer)
        for path, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, MoELayer)
    ]
    try:
        for path, layer in locations:
            module.set_submodule(path, stand_ins[id(layer)])
        yield module
    finally:
        for path, layer in locations:
            module.set_submodule(path, layer)


def sharing_weights(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares its parameters and buffers."""
    # The memo maps every tensor to itself, so that the deep copy copies none.
    memo = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)


def choice_key(layer: str, choice: str) -> str:
    """Returns the name of a layer's choice within a model: the layer's name, if it has only one."""
    return f"{layer} {choice}" if choice else layer


@contextmanager
def algorithm_1(
    model: nn.Module,
    keep: dict[str, int],
    *,
    renormalize: bool = False,
    algorithm: Algorithm = "masked",
) -> Iterator[None]:
    """Within the context, each layer in `keep` computes with its k."""
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
    """Within the context, each forward pass records every layer's choices, by `choice_key`."""
    records: dict[str, RoutingDecision] = {}

    def record(module: nn.Module, args: tuple[Tensor, ...], _: Tensor, name: str) -> None:
        assert isinstance(module, MoELayer)
        for choice, decision in module.choices(*args).items():
            records[choice_key(name, choice)] = decision

    with ExitStack() as hooks:
        for name, layer in moe_layers(model).items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
        yield records
