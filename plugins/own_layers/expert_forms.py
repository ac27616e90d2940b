"""Reads the experts that a user passes: lists of maps, stacked tensors, or whole modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, TypeGuard, get_args

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...data.user_code import user_code
from ...errors import UsageError
from ...graphs.layers.base import Matrices
from ...graphs.layers.expert import Activation, ExpertNorm, NormWeights
from ..token_routed.layers.experts import Gate

LinearMap = nn.Module | Tensor | tuple[Tensor, Tensor | None]
"""A linear map: an `nn.Linear` (or a 1×1 convolution), a weight [out, in], or weight and bias."""

Expert = LinearMap | Sequence[LinearMap]
"""`(first, second)`; `(gate, up, second)`; one map; or a module that computes the expert. An
`nn.LayerNorm` or `nn.RMSNorm` in such a list is applied to the output of the map before it."""

PAIRS = "experts=[(e.up, e.down) for e in layer.experts], or (gate, up, down)"

TRANSPOSED = "nn.Linear and lists have [out, in], w1 and w2 [n, in, out]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """The experts that a user passes: the properties of `ExpertMapsSpec`, and the weights.

    `w1` and `w2` have a matrix [in, out] for each expert; with a gate, `gate` is the order of the
    columns of `w1` and `b1`. `w2` is None for experts of one map. If `activation` is None, the
    caller chooses it.
    """

    w1: Matrices
    b1: Tensor | None = None
    w2: Matrices | None = None
    b2: Tensor | None = None
    gate: Gate = "none"
    activation: Activation | None = None
    hidden_norm: ExpertNorm | None = None
    out_norm: ExpertNorm | None = None
    out_activation: Activation = "identity"
    norms: NormWeights = field(default_factory=NormWeights)

    @property
    def count(self) -> int:
        return len(self.w1)

    @property
    def dim(self) -> int:
        return int(self.w1[0].shape[0])

    @property
    def hidden(self) -> int:
        """The width between two maps, 0 if there is one map."""
        return 0 if self.w2 is None else int(self.w2[0].shape[0])

    @property
    def out(self) -> int:
        return int((self.w1 if self.w2 is None else self.w2)[0].shape[1])

    def exchanged(self) -> ExpertForm:
        return self.in_halves()._with_columns(
            lambda columns: torch.cat(columns.chunk(2, dim=-1)[::-1], dim=-1)
        )

    def in_halves(self) -> ExpertForm:
        """Returns the experts with gate before up in the columns of `w1`; copies if needed."""
        if self.gate != "interleaved":
            return self
        return replace(self, gate="concatenated")._with_columns(
            lambda columns: torch.cat([columns[..., ::2], columns[..., 1::2]], dim=-1)
        )

    def _with_columns(self, change: Callable[[Tensor], Tensor]) -> ExpertForm:
        """Returns the experts with the columns of their first maps changed."""
        b1 = None if self.b1 is None else change(self.b1)
        return replace(self, w1=tuple(map(change, self.w1)), b1=b1)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertArguments:
    """The arguments for experts: `experts`, or the stacked `w1`, `b1`, `w2` and `b2`.

    Each of the n `experts` is `(first, second)`, which computes second(act(first(x))); `(gate, up,
    second)`, which computes second(act(gate(x)) · up(x)); one map, which only an `out_activation`
    may follow; or a module, whose forward is read. A map is a `LinearMap`. An `nn.LayerNorm` or
    `nn.RMSNorm` in a tuple is applied to the output of the map before it.

    The stacked weights have the input axis first: `w1` [n, d, h], `b1` [n, h], `w2` [n, h, o] and
    `b2` [n, o]. `w1` and `w2` may be lists of n matrices, and `w2` may be left out. With a `gate`,
    `w1` is [n, d, 2h]; its columns are `concatenated` (gate before up) or `interleaved`.

    `activation` is `gelu` (exact), `gelu-tanh`, `relu`, `silu` (z·sigmoid(alpha·z)), `relu2`
    (max(z, 0)²), `softmax` over the channels, or `identity`. `out_activation` follows the last map.
    """

    experts: Sequence[Expert] | nn.ModuleList | None = None
    w1: Tensor | Sequence[Tensor] | None = None
    b1: Tensor | None = None
    w2: Tensor | Sequence[Tensor] | None = None
    b2: Tensor | None = None
    gate: Gate | None = None
    activation: Activation | None = None
    alpha: float = 1.0
    out_activation: Activation | None = None
    read: ExpertForm | None = field(default=None, repr=False)
    """Experts that were read earlier; if given, all other arguments are ignored."""

    def form(self) -> ExpertForm:
        """Returns the experts that the arguments describe; UsageError names a wrong argument."""
        if self.read is not None:
            return self.read
        for what, value, choices in (
            ("activation", self.activation, Activation),
            ("out_activation", self.out_activation, Activation),
            ("gate", self.gate, Gate),
        ):
            if value is not None:
                check_choice(what, value, choices)
        stacked = self.w1, self.b1, self.w2, self.b2
        if self.experts is None:
            form = self._stacked()
        elif any(weight is not None for weight in stacked):
            raise UsageError(
                "the experts are given twice: experts and w1, b1, w2 or b2", hint="give only one"
            )
        else:
            form = self._from_list()
        activation = form.activation if self.activation is None else self.activation
        if form.w2 is None and self.activation is not None:
            raise UsageError(
                f"activation={self.activation!r} applies between two maps, but each expert has one",
                hint="out_activation follows an expert's last map",
            )
        if self.alpha != 1.0 and activation not in (None, "silu"):
            raise UsageError(
                f"alpha={self.alpha:g} needs activation='silu', but activation is {activation!r}",
                hint="leave alpha out",
            )
        after = form.out_activation if self.out_activation is None else self.out_activation
        return replace(form, activation=activation, out_activation=after)

    def with_biases(self, biases: Mapping[int, Tensor]) -> Sequence[Expert] | None:
        """Returns `experts` with the missing biases of maps that were given as weights only.

        `biases` has a layer's biases by the memory address of their weights. None if none fits.
        """
        if self.experts is None or not all(isinstance(e, list | tuple) for e in self.experts):
            return None
        parts = [part for expert in self.experts for part in entries_of(expert)]
        if not any(isinstance(part, Tensor) and part.data_ptr() in biases for part in parts):
            return None
        return [tuple(_with_bias(part, biases) for part in entries_of(e)) for e in self.experts]

    def tensors(self) -> Iterator[Tensor]:
        return _tensors((self.experts, self.w1, self.b1, self.w2, self.b2))

    def _stacked(self) -> ExpertForm:
        if self.w1 is None:
            raise UsageError("no experts are given", hint=f"{PAIRS}; or w1 and w2, stacked")
        gate: Gate = self.gate or "none"
        w1 = _matrices("w1", self.w1, "[n, d, h], or with a gate [n, d, 2h]")
        n, (d, inner) = len(w1), w1[0].shape
        b1 = float_vector("b1", self.b1, (n, inner), "as many columns as w1")
        if self.w2 is None:
            if gate != "none" or self.b2 is not None:
                extra = f"gate={gate!r}" if gate != "none" else "b2"
                raise UsageError(f"{extra} needs two maps, but w2 is not given")
            return ExpertForm(w1=w1, b1=b1)
        w2 = _matrices("w2", self.w2, "[n, h, o]")
        rows, out = w2[0].shape
        names = f"w1 {[n, d, inner]}", f"w2 {[len(w2), rows, out]}"
        _check_hidden(names, gate, inner, (rows, out))
        if len(w2) != n:
            raise UsageError(f"w1 has {n} experts, but w2 has {len(w2)}")
        b2 = float_vector("b2", self.b2, (n, out), "as many columns as w2")
        return ExpertForm(w1=w1, b1=b1, w2=w2, b2=b2, gate=gate)

    def _from_list(self) -> ExpertForm:
        """Returns the experts of a list, without copying weights unless a gate is joined."""
        experts = [_parts(f"experts[{e}]", part) for e, part in enumerate(entries_of(self.experts))]
        if not experts:
            raise UsageError(
                f"experts is a {type(self.experts).__name__} that contains no experts", hint=PAIRS
            )
        first = experts[0]
        for e, part in enumerate(experts):
            if len(part.maps) != len(first.maps):
                counts = sorted({len(first.maps), len(part.maps)})
                raise UsageError(f"some experts have {counts[0]} maps and others {counts[1]}")
            if part.around != first.around:
                raise UsageError(
                    f"experts[{e}] differs from experts[0] in more than its weights",
                    hint="experts may differ only in their weights: move the rest to forward",
                )
        three = len(first.maps) == 3
        if three and self.gate not in (None, "concatenated"):
            raise UsageError(
                f"gate={self.gate!r} cannot describe experts of three maps", hint="leave gate out"
            )
        gate: Gate = "concatenated" if three or first.halves else self.gate or "none"
        maps = [_join_gate(part) for part in experts]
        w1, b1 = _collect("first", [expert[0] for expert in maps])
        form = ExpertForm(
            w1=w1,
            b1=b1,
            gate=gate,
            activation=first.activation,
            hidden_norm=_norm(first.inner),
            out_norm=_norm(first.outer),
            out_activation=first.out_activation,
            norms=_norm_weights(experts),
        )
        if len(maps[0]) == 1:
            if gate != "none":
                raise UsageError(f"gate={gate!r} needs two maps, but the experts have one")
            return form
        (inner, d), (out, columns) = (weight.shape for weight, _ in maps[0])
        names = f"experts[0]: its first weight {[inner, d]}", f"its second {[out, columns]}"
        _check_hidden(names, gate, inner, (columns, out))
        w2, b2 = _collect("last", [expert[1] for expert in maps])
        form = replace(form, w2=w2, b2=b2)
        return form.exchanged() if first.up_first else form


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in an argument for experts, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif value is not None:
        for part in value:
            yield from _tensors(part)


def _check_hidden(maps: tuple[str, str], gate: Gate, inner: int, second: tuple[int, int]) -> None:
    """Raises UsageError if a second map [in, out] does not fit the output of the first.

    `maps` are the names of the two in messages.
    """
    hidden, (rows, out) = inner if gate == "none" else inner // 2, second
    if rows == hidden and not (gate != "none" and inner % 2):
        return
    if gate == "none" and inner == 2 * rows:
        hint = "gate='concatenated', or 'interleaved', if one half of them gates the other"
    elif out == hidden:
        hint = f"check whether the second is transposed (.mT): {TRANSPOSED}"
    else:
        hint = f"both must belong to one expert; {TRANSPOSED}"
    raise UsageError(
        f"{maps[0]} returns {hidden} numbers after its activation, but {maps[1]} expects {rows}",
        hint=hint,
    )


def _matrices(what: str, value: Tensor | Sequence[Tensor], expected: str) -> Matrices:
    """Returns stacked matrices, or a tuple of n matrices of the same shape."""
    if isinstance(value, Tensor):
        return float_tensor(what, value, (3,), expected)
    matrices = [
        float_tensor(f"{what}[{e}]", matrix, (2,), f"a matrix of {expected}")
        for e, matrix in enumerate(entries_of(value))
    ]
    if not matrices or len({matrix.shape for matrix in matrices}) > 1:
        problem = "matrices of different shapes" if matrices else "no matrices"
        raise UsageError(f"{what} contains {problem}")
    return tuple(matrices)


Map = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out]."""


def _parts(what: str, expert: object) -> ExpertParts:
    """Returns an expert's maps, and the other parts that are given with them."""
    if is_weight_and_bias(expert) or isinstance(expert, Tensor) or is_map(expert):
        return ExpertParts(maps=(linear_map(what, expert),))
    if isinstance(expert, nn.Module) and not isinstance(expert, nn.ModuleList):
        return parts_of(what, expert)
    maps: list[Map] = []
    norms: dict[int, nn.Module] = {}
    entries = entries_of(expert)
    for i, part in enumerate(entries):
        if is_norm(part) and maps:
            norms[len(maps)] = part
        else:
            maps.append(linear_map(f"{what}[{i}]" if len(entries) > 1 else what, part))
    if not 1 <= len(maps) <= 3:
        raise UsageError(f"{what} is a {type(expert).__name__}, not (first, second)", hint=PAIRS)
    last = norms.pop(len(maps), None)
    inner = norms.pop(1, None) if len(maps) == 2 else None
    if norms:
        raise UsageError(
            f"{what}: a normalisation follows one map of a gated pair",
            hint="a norm may follow only the first map of two, or the last map",
        )
    return ExpertParts(maps=tuple(maps), inner=inner, outer=last)


def _join_gate(parts: ExpertParts) -> tuple[Map, ...]:
    """Returns an expert's maps; the first two of three are joined, the gate's outputs first."""
    if len(parts.maps) < 3:
        return parts.maps
    gate, up, last = parts.maps
    if gate[0].shape != up[0].shape:
        raise UsageError(
            f"a gated expert's first two weights are {list(gate[0].shape)} and {list(up[0].shape)}",
            hint="of three maps, the first two must have the same shape, [h, d]",
        )
    biases = _biases([gate, up])
    both = torch.cat([gate[0], up[0]]), None if biases is None else biases.flatten()
    return both, last


def _collect(which: str, maps: Sequence[Map]) -> tuple[Matrices, Tensor | None]:
    """Returns one map of all experts: views [in, out] of the weights, and the biases [n, out]."""
    for e, (weight, _) in enumerate(maps):
        what = f"experts[{e}]: its {which} weight"
        check_shape(what, weight, tuple(maps[0][0].shape), "[out, in], as in the others")
    return tuple(weight.T for weight, _ in maps), _biases(maps)


def _norm_weights(experts: Sequence[ExpertParts]) -> NormWeights:
    """Returns the gains and shifts of all experts, stacked."""

    def stacked(which: Literal["inner", "outer"], name: str) -> Tensor | None:
        weights = [getattr(getattr(expert, which), name, None) for expert in experts]
        present = [weight.detach().float() for weight in weights if weight is not None]
        return torch.stack(present) if present else None

    return NormWeights(
        g1=stacked("inner", "weight"),
        s1=stacked("inner", "bias"),
        g2=stacked("outer", "weight"),
        s2=stacked("outer", "bias"),
    )


def is_weight_and_bias(value: object) -> bool:
    """Whether a value is one map: a matrix with a vector or None; two matrices are two maps."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], Tensor)
        and value[0].ndim > 1
        and (value[1] is None or (isinstance(value[1], Tensor) and value[1].ndim == 1))
    )


def linear_map(what: str, value: object) -> Map:
    """Returns a map's weight and bias, which may be given as a linear layer or 1×1 convolution."""
    pair: Any = value
    if isinstance(value, nn.Module):
        pair = getattr(value, "weight", None), getattr(value, "bias", None)
    elif isinstance(value, Tensor):
        pair = value, None
    if not is_weight_and_bias(pair) or any(size != 1 for size in pair[0].shape[2:]):
        shown = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise UsageError(
            f"{what} is a {type(value).__name__}{shown}, not a linear map",
            hint="give an nn.Linear, its weight [out, in], or (weight, bias)",
        )
    weight = float_tensor(what, pair[0], (2, 3, 4, 5), "[out, in]").flatten(1)
    return weight, float_vector(f"{what}'s bias", pair[1], (weight.shape[0],))


def _biases(maps: Sequence[Map]) -> Tensor | None:
    """Returns the stacked biases [n, out]; None if no map has one."""
    if all(bias is None for _, bias in maps):
        return None
    return torch.stack([w.new_zeros(w.shape[0]) if bias is None else bias for w, bias in maps])


def _with_bias(part: LinearMap, biases: Mapping[int, Tensor]) -> LinearMap:
    bias = biases.get(part.data_ptr()) if isinstance(part, Tensor) else None
    return part if bias is None else (part, bias)  # type: ignore[return-value]


def entries_of(value: object) -> list[Any]:
    """Returns the entries of a list or of PyTorch's list modules; none for other values."""
    is_list = isinstance(value, list | tuple | nn.ModuleList | nn.ParameterList)
    return list(value) if is_list else []  # type: ignore[call-overload]


def float_tensor(what: str, value: object, ranks: tuple[int, ...] | None, expected: str) -> Tensor:
    """Returns a tensor, which must have one of these ranks, detached and in float32."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{what} is a {type(value).__name__}, not a tensor {expected}".rstrip())
    if ranks is not None and value.ndim not in ranks:
        raise UsageError(f"{what} has the shape {list(value.shape)}, expected {expected}")
    return value.detach().to(torch.float32)


def float_vector(
    what: str, value: Tensor | None, expected: tuple[int, ...], why: str = "a number per channel"
) -> Tensor | None:
    if value is None:
        return None
    checked = float_tensor(what, value, None, str(list(expected)))
    check_shape(what, checked, expected, why)
    return checked


def check_shape(what: str, value: Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(value.shape) != expected:
        raise UsageError(
            f"{what} has the shape {list(value.shape)}, expected {list(expected)}: {why}"
        )


def check_choice(what: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        names = ", ".join(map(repr, get_args(choices)))
        raise UsageError(f"{what}={value!r} is not one of {names}")


# --- an expert that is a module: its forward is traced and read as maps ---

READ = (
    "an expert is one linear map, two, or (gate, up, down), with activations, nn.LayerNorm or "
    "nn.RMSNorm between and after them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """The parts of one expert: weights [out, in] with biases, norms, and activations.

    Of three maps, the first is the gate. `halves`: the first of two maps returns gate and up or, if
    `up_first`, up and gate. `inner` follows the first map of two, and `outer` the last map. If
    `activation` is None, it was not given.
    """

    maps: tuple[Map, ...] = ()
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    activation: Activation | None = None
    out_activation: Activation = "identity"
    halves: bool = False
    up_first: bool = False

    @property
    def around(self) -> tuple[object, ...]:
        """All parts except the weights; they must be equal for all experts of a layer."""
        norms = [
            (_norm(norm), *(getattr(norm, name, None) is None for name in ("weight", "bias")))
            for norm in (self.inner, self.outer)
        ]
        return (self.halves, self.up_first, self.activation, self.out_activation, *norms)


def is_map(module: object) -> bool:
    """Whether a module is a linear map: it has a weight and at most a bias."""
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return True
    if not isinstance(module, nn.Module) or is_norm(module) or any(True for _ in module.children()):
        return False
    weight = getattr(module, "weight", None)
    names = {name for name, _ in module.named_parameters()}
    return isinstance(weight, Tensor) and weight.ndim > 1 and names <= {"weight", "bias"}


def is_norm(module: object) -> TypeGuard[nn.LayerNorm | nn.RMSNorm]:
    """Whether a module is a normalisation over channels that an expert may contain."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm)


def _norm(module: nn.Module | None) -> ExpertNorm | None:
    if isinstance(module, nn.LayerNorm):
        return ExpertNorm("layernorm", module.eps)
    if isinstance(module, nn.RMSNorm):
        return ExpertNorm("rmsnorm", rms_eps(module))
    return None


def rms_eps(norm: nn.RMSNorm) -> float:
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps


def parts_of(what: str, module: nn.Module) -> ExpertParts:
    """Reads the forward of a module; a UsageError names the part that was not recognised."""
    name = f"{what} ({type(module).__name__})"
    hint = f"give its maps: [(e.up, e.down) for e in layer.experts]; {READ}"
    with user_code(f"{name}: its forward cannot be read", hint):
        graph = fx.symbolic_trace(module.eval())
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            value = known.get(node.args[0])
            if isinstance(value, _Value) and value.at != "input":
                return value.parts()
            raise UsageError(f"{name}: its forward does not return an expert's output", hint=READ)
        try:
            known[node] = _value(graph, node, known)
        except _UnknownStepError as error:
            raise UsageError(
                f"{name}: its forward has a step that is not supported in an expert: {error}",
                hint=f"{READ}; move other steps of an expert to forward",
            ) from error
    raise AssertionError("a graph has an output")


class _UnknownStepError(Exception):
    """A step of a forward that an expert may not have; the message describes the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value(ExpertParts):
    """A value in an expert's forward: the parts before it, and its position among the maps.

    `half` is the number of the value's half in the first map's output. A `sigmoid` becomes a SiLU
    if it is multiplied by its input.
    """

    at: Literal["input", "first", "hidden", "last", "after"] = "input"
    half: int | None = None
    sigmoid: bool = False

    def __str__(self) -> str:
        """The position, for messages."""
        return _POSITIONS[self.at]

    def parts(self) -> ExpertParts:
        """Returns the parts if the value is an expert's output; otherwise raises UsageError."""
        one_map = len(self.maps) == 1
        ends = one_map or self.at in ("last", "after")
        if self.half is not None or self.sigmoid or not ends:
            raise UsageError("an expert's forward ends before its last map", hint=READ)
        if not one_map:
            return self
        out_activation = self.activation or "identity"
        return ExpertParts(
            maps=self.maps, outer=self.inner, out_activation=out_activation, halves=self.halves
        )

    def mapped(self, weight: Tensor, bias: Tensor | None) -> _Value:
        if self.at == "input":
            return replace(self, at="first", maps=((weight, bias),))
        if self.at in ("first", "hidden") and self.half is None and not self.sigmoid:
            activation = self.activation or "identity"
            maps = (*self.maps, (weight, bias))
            return replace(self, at="last", maps=maps, activation=activation)
        raise _UnknownStepError("another linear map")

    def activated(self, activation: Activation) -> _Value:
        if self.at == "first":
            return replace(self, at="hidden", activation=activation)
        if self.at == "last":
            return replace(self, at="after", out_activation=activation)
        raise _UnknownStepError(f"{activation} of something other than a map's output")

    def normalised(self, norm: nn.Module) -> _Value:
        if self.at == "first" and self.inner is None and self.half is None:
            return replace(self, inner=norm)
        if self.at == "last" and self.outer is None:
            return replace(self, outer=norm)
        raise _UnknownStepError(f"a {type(norm).__name__} of something other than a map's output")

    def biased(self, bias: Tensor) -> _Value:
        """Returns the output of the last map, which has no bias yet, with this bias."""
        if self.at in ("first", "last") and bias.ndim == 1 and self.maps[-1][1] is None:
            return replace(self, maps=(*self.maps[:-1], (self.maps[-1][0], bias)))
        raise _UnknownStepError("a sum that is not a bias")

    def squared(self) -> _Value:
        if self.at == "hidden" and self.activation == "relu":
            return replace(self, activation="relu2")
        if self.at == "after" and self.out_activation == "relu":
            return replace(self, out_activation="relu2")
        raise _UnknownStepError("a square of something other than a ReLU")

    def times(self, other: _Value) -> _Value:
        """Returns the product of a gate and up, or of a sigmoid and its input."""
        for gate, up in ((self, other), (other, self)):
            if gate.sigmoid and gate.maps is up.maps and gate.half == up.half:
                return up.activated("silu")
            if gate.at != "hidden" or up.at != "first" or gate.sigmoid or gate.inner is not None:
                continue
            if gate.half is not None and up.half == 1 - gate.half and gate.maps is up.maps:
                return replace(gate, half=None, halves=True, up_first=gate.half == 1)
            if gate.half is None and up.half is None and len(gate.maps) == len(up.maps) == 1:
                return replace(gate, maps=(*gate.maps, *up.maps))
        raise _UnknownStepError("a product that is not a gate")


_ACTIVATIONS: Mapping[object, Activation] = MappingProxyType(
    {
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        F.relu: "relu",
        torch.relu: "relu",
        F.silu: "silu",
        "relu": "relu",
        "relu_": "relu",
    }
)

LAST_AXES = (-1, 1, 2)
"""Axes of a softmax that may be the channels of an expert's rows, [t, d] or [b, m, d]. The
comparison with the user's layer finds the cases in which they are not."""

_WITHOUT_EFFECT = (F.dropout, "contiguous", "float", "clone")


def _value(graph: fx.GraphModule, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Returns the value of a node, if an expert may compute it."""
    args = [known.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
    first = args[0] if args else None
    if node.op == "placeholder":
        return first if node.args else _Value()
    if not isinstance(first, _Value):
        value = _value_of_weights(graph, node, args)
        if value is not None:
            return value
        raise _UnknownStepError(node.format_node() or str(node))
    if node.op == "call_module":
        return _value_of_module(graph.get_submodule(str(node.target)), first)
    return _value_of_function(node, first, args)


def _value_of_weights(graph: fx.GraphModule, node: fx.Node, args: list[Any]) -> Any:
    """Returns the value of an operation on parameters or a pair of halves; None for others."""
    if node.op == "get_attr":
        owner: Any = graph
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        return owner
    first = args[0] if args else None
    transposes = node.target in ("t", "transpose") or (
        node.target is getattr and args[1] in ("T", "mT")
    )
    if isinstance(first, Tensor) and transposes:
        return first.mT
    if isinstance(first, tuple) and node.target is operator.getitem:
        return first[int(args[1])]
    return None


def _value_of_module(module: nn.Module, x: _Value) -> _Value:
    if is_map(module):
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        if any(size != 1 for size in weight.shape[2:]):
            raise _UnknownStepError(f"{module}")
        return x.mapped(weight.flatten(1), bias if isinstance(bias, Tensor) else None)
    if is_norm(module):
        return x.normalised(module)
    if isinstance(module, nn.Dropout | nn.Identity):
        return x
    dim, approximate = getattr(module, "dim", None), getattr(module, "approximate", None)
    activation = _activation_of(type(module), dim, approximate)
    if activation is None:
        raise _UnknownStepError(f"a {type(module).__name__}")
    return x.activated(activation)


def _value_of_function(node: fx.Node, x: _Value, args: list[Any]) -> Any:
    target: Any = node.target
    second = args[1] if len(args) > 1 else None
    if isinstance(second, Tensor):
        value = _with_parameter(node, x, second, args)
        if value is not None:
            return value
    options = (node.kwargs.get(name, second) for name in ("dim", "approximate"))
    activation = _activation_of(target, *options)
    if activation is not None:
        return x.activated(activation)
    if target in (operator.mul, torch.mul, "mul", "mul_") and isinstance(second, _Value):
        return x.times(second)
    if target in (torch.sigmoid, F.sigmoid, "sigmoid") and x.at in ("first", "last"):
        return replace(x, sigmoid=True, at="hidden" if x.at == "first" else "after")
    squares = target in (torch.square, "square")
    squares |= target in (pow, operator.pow, torch.pow, "pow") and second == 2
    if squares or target in _WITHOUT_EFFECT:
        return x.squared() if squares else x
    if target in (torch.chunk, "chunk") and second == 2 and x.at == "first":
        return replace(x, half=0), replace(x, half=1)
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    raise _UnknownStepError(f"{name} of {' and '.join(map(str, args))}")


def _with_parameter(node: fx.Node, x: _Value, parameter: Tensor, args: list[Any]) -> _Value | None:
    """Returns the value of a map, or of a sum with a bias; None for other functions."""
    if node.target is F.linear:
        bias = args[2] if len(args) > 2 else node.kwargs.get("bias")
        return x.mapped(parameter, bias if isinstance(bias, Tensor) else None)
    if node.target in (operator.matmul, torch.matmul, "matmul"):
        return x.mapped(parameter.mT, None)
    return x.biased(parameter) if node.target in (operator.add, torch.add, "add") else None


def _activation_of(kind: object, dim: object, approximate: object) -> Activation | None:
    """Returns the activation that a function or module class computes; None for others."""
    if kind in (nn.Softmax, torch.softmax, F.softmax, "softmax"):
        return "softmax" if dim in LAST_AXES else None
    if kind in (nn.GELU, F.gelu):
        return "gelu-tanh" if approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(kind)


_POSITIONS: Mapping[str, str] = MappingProxyType(
    {
        "input": "the expert's input",
        "first": "the first map's output",
        "hidden": "a value between the maps",
        "last": "the last map's output",
        "after": "a value after the last map",
    }
)
