"""A layer's experts in the user's words, read: lists of maps, stacked tensors, or whole modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...graphs.layers.expert import Activation, ExpertNorm, NormWeights
from ...graphs.layers.experts import Gate
from ...graphs.layers.soft_moe import Matrices
from .expert_modules import ExpertParts, is_map, is_norm, parts_of

LinearMap = nn.Module | Tensor | tuple[Tensor, Tensor | None]
"""A linear map: an `nn.Linear` (or a 1×1 convolution), a weight [out, in], or weight and bias."""

Expert = LinearMap | Sequence[LinearMap]
"""`(first, second)`; `(gate, up, second)`; one map alone; or a module that computes the expert. An
`nn.LayerNorm` or `nn.RMSNorm` in such a list follows the map that it stands behind."""

PAIRS = "experts=[(e.up, e.down) for e in layer.experts], or (gate, up, down)"

TRANSPOSED = "nn.Linear and lists have [out, in], w1 and w2 [n, in, out]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """Experts as they were given: what `AroundMaps` says of them, and their weights.

    `w1` and `w2` hold a matrix [in, out] for each expert; with a gate the columns of `w1` and `b1`
    are as it says. `w2` is None for experts of one map. An `activation` of None is for who asks.
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
        """How many experts there are."""
        return len(self.w1)

    @property
    def dim(self) -> int:
        """The width of what an expert is given."""
        return int(self.w1[0].shape[0])

    @property
    def hidden(self) -> int:
        """The width between two maps, 0 where there is one."""
        return 0 if self.w2 is None else int(self.w2[0].shape[0])

    @property
    def out(self) -> int:
        """The width of what an expert returns."""
        return int((self.w1 if self.w2 is None else self.w2)[0].shape[1])

    def exchanged(self) -> ExpertForm:
        """Returns the experts with gate and up exchanged."""
        return replace(
            self,
            w1=tuple(self._other(each) for each in self.w1),
            b1=None if self.b1 is None else self._other(self.b1),
        )

    def _other(self, columns: Tensor) -> Tensor:
        if self.gate == "concatenated":
            return torch.cat(columns.chunk(2, dim=-1)[::-1], dim=-1)
        return torch.stack([columns[..., 1::2], columns[..., ::2]], dim=-1).flatten(-2)

    def in_halves(self) -> ExpertForm:
        """Returns the experts with gate before up in the columns of `w1`, copied if need be."""
        if self.gate != "interleaved":
            return self

        def halves(columns: Tensor) -> Tensor:
            return torch.cat([columns[..., ::2], columns[..., 1::2]], dim=-1)

        w1 = torch.stack(tuple(halves(each) for each in self.w1))
        b1 = None if self.b1 is None else halves(self.b1)
        return replace(self, w1=w1, b1=b1, gate="concatenated")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertArguments:
    """What descriptions take for experts: `experts`, or the stacked `w1`, `b1`, `w2` and `b2`.

    `experts` are n `(first, second)` pairs of `nn.Linear` or weights [out, in], which compute
    second(act(first(x))); `(gate, up, second)`: second(act(gate(x)) · up(x)); one map alone, which
    only an `out_activation` may follow; or modules, whose forward is read and tells the rest. An
    `nn.LayerNorm` or `nn.RMSNorm` behind a map in such a list follows it. Instead of `experts` the
    stacked `w1` [n, d, h], `b1` [n, h], `w2` [n, h, o] and `b2` [n, o], inputs first, of which `w1`
    and `w2` may be lists of n matrices, and `w2` may be left out; with a `gate`, `w1` is
    [n, d, 2h], and its columns `concatenated`, gate before up, or `interleaved`: gate, up, gate, …

    `activation` is `gelu` (exact), `gelu-tanh`, `relu`, `silu`, which is z·sigmoid(alpha·z),
    `relu2`, max(z, 0)², or `identity`. `out_activation` follows an expert's last map.
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
    """The experts, where they were read before: nothing else says what they are then."""

    def form(self) -> ExpertForm:
        """Returns the experts, read; UsageError names the argument and what was expected."""
        if self.read is not None:
            return self.read
        for what, given, choices in (
            ("activation", self.activation, Activation),
            ("out_activation", self.out_activation, Activation),
            ("gate", self.gate, Gate),
        ):
            if given is not None:
                choice(what, given, choices)
        stacked = self.w1, self.b1, self.w2, self.b2
        if self.experts is None:
            form = self._stacked()
        elif any(each is not None for each in stacked):
            raise UsageError(
                "the experts are given twice: experts and w1, b1, w2 or b2", hint="give one of them"
            )
        else:
            form = self._listed()
        activation = form.activation if self.activation is None else self.activation
        if form.w2 is None and self.activation is not None:
            raise UsageError(
                f"activation={self.activation!r} stands between two maps, and an expert has one",
                hint="out_activation is what follows an expert's last map",
            )
        if self.alpha != 1.0 and activation not in (None, "silu"):
            raise UsageError(
                f"alpha={self.alpha:g} goes with activation='silu', and activation is "
                f"{activation!r}",
                hint="leave it out",
            )
        after = form.out_activation if self.out_activation is None else self.out_activation
        return replace(form, activation=activation, out_activation=after)

    def tensors(self) -> Iterator[Tensor]:
        """Yields the experts' weights as they were given."""
        if self.experts is None:
            for given in (self.w1, self.b1, self.w2, self.b2):
                if given is not None:
                    yield from (given,) if isinstance(given, Tensor) else given
            return
        for expert in several(self.experts):
            if isinstance(expert, nn.Module):
                yield from expert.parameters()
                continue
            for part in [expert] if is_weight_and_bias(expert) else several(expert) or [expert]:
                if isinstance(part, nn.Module):
                    yield from part.parameters()
                elif isinstance(part, Tensor):
                    yield part
                else:
                    yield from (each for each in part if each is not None)

    def _stacked(self) -> ExpertForm:
        """The experts from w1, b1, w2 and b2."""
        if self.w1 is None:
            raise UsageError("the experts are not given", hint=f"{PAIRS}; or w1 and w2, stacked")
        gate: Gate = self.gate or "none"
        w1 = _matrices("w1", self.w1, "[n, d, h], or with a gate [n, d, 2h]")
        n, (d, inner) = len(w1), w1[0].shape
        b1 = vector("b1", self.b1, (n, inner), "as many columns as w1")
        if self.w2 is None:
            if gate != "none" or self.b2 is not None:
                extra = f"gate={gate!r}" if gate != "none" else "b2"
                raise UsageError(f"{extra} goes with two maps, and w2 is not given")
            return ExpertForm(w1=w1, b1=b1)
        w2 = _matrices("w2", self.w2, "[n, h, o]")
        rows, out = w2[0].shape
        names = f"w1 {[n, d, inner]}", f"w2 {[len(w2), rows, out]}"
        _check_hidden(names, gate, inner, (rows, out))
        if len(w2) != n:
            raise UsageError(f"w1 is of {n} experts and w2 of {len(w2)}")
        b2 = vector("b2", self.b2, (n, out), "as many columns as w2")
        return ExpertForm(w1=w1, b1=b1, w2=w2, b2=b2, gate=gate)

    def _listed(self) -> ExpertForm:
        """The experts from a list of them; their matrices are views, one per expert."""
        experts = [_parts(f"experts[{e}]", each) for e, each in enumerate(several(self.experts))]
        if not experts:
            raise UsageError(
                f"experts is a {type(self.experts).__name__} without entries", hint=PAIRS
            )
        first = experts[0]
        for e, each in enumerate(experts):
            if len(each.maps) != len(first.maps):
                counts = sorted({len(first.maps), len(each.maps)})
                raise UsageError(f"some experts have {counts[0]} maps and others {counts[1]}")
            if each.around != first.around:
                raise UsageError(
                    f"experts[{e}] computes something else around its maps than experts[0]",
                    hint="experts differ in their weights alone: the others belong into forward",
                )
        three = len(first.maps) == 3
        if three and self.gate not in (None, "concatenated"):
            raise UsageError(f"gate={self.gate!r} and experts of three maps", hint="leave gate out")
        gate: Gate = "concatenated" if three or first.halves else self.gate or "none"
        swapped = [_swapped(_joined(each)) if each.up_first else _joined(each) for each in experts]
        d = swapped[0][0][0].shape[1]
        inner = swapped[0][0][0].shape[0]
        for e, maps in enumerate(swapped):
            what = f"experts[{e}]: its first weight"
            check_shape(what, maps[0][0], (inner, d), "[out, in], as of the others")
        w1, b1 = tuple(maps[0][0].T for maps in swapped), _biases([maps[0] for maps in swapped])
        norms = _norm_weights(experts)
        form = ExpertForm(
            w1=w1,
            b1=b1,
            gate=gate,
            activation=first.activation,
            hidden_norm=first.hidden_norm,
            out_norm=first.out_norm,
            out_activation=first.out_activation,
            norms=norms,
        )
        if len(swapped[0]) == 1:
            if gate != "none":
                raise UsageError(f"gate={gate!r} goes with two maps, and the experts have one")
            return form
        out, columns = swapped[0][1][0].shape
        names = f"experts[0]: its first weight {[inner, d]}", f"its second {[out, columns]}"
        _check_hidden(names, gate, inner, (columns, out))
        for e, maps in enumerate(swapped):
            what = f"experts[{e}]: its last weight"
            check_shape(what, maps[1][0], (out, columns), "[out, in], as of the others")
        w2, b2 = tuple(maps[1][0].T for maps in swapped), _biases([maps[1] for maps in swapped])
        return replace(form, w2=w2, b2=b2)


def _check_hidden(maps: tuple[str, str], gate: Gate, inner: int, second: tuple[int, int]) -> None:
    """Raises UsageError where a second map [in, out] does not take what the first one gives.

    `maps` are the two in words.
    """
    hidden, (rows, out) = inner if gate == "none" else inner // 2, second
    if rows == hidden and not (gate != "none" and inner % 2):
        return
    if gate == "none" and inner == 2 * rows:
        hint = "gate='concatenated', or 'interleaved', if one half of them gates the other"
    elif out == hidden:
        hint = f"the second is transposed (.mT): {TRANSPOSED}"
    else:
        hint = f"both are of one expert; {TRANSPOSED}"
    raise UsageError(
        f"{maps[0]} gives {hidden} numbers after its activation, and {maps[1]} takes {rows}",
        hint=hint,
    )


def _matrices(what: str, given: Tensor | Sequence[Tensor], expected: str) -> Matrices:
    """Stacked matrices, or n of one shape."""
    if isinstance(given, Tensor):
        return tensor(what, given, (3,), expected)
    listed = [
        tensor(f"{what}[{e}]", each, (2,), f"a matrix of {expected}")
        for e, each in enumerate(several(given))
    ]
    if not listed or len({each.shape for each in listed}) > 1:
        raise UsageError(f"{what} holds {len(listed)} matrices that are not of one shape")
    return tuple(listed)


Map = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out]."""


def _parts(what: str, expert: object) -> ExpertParts:
    """An expert's maps, and what is around them as far as it says."""
    if is_weight_and_bias(expert) or isinstance(expert, Tensor) or is_map(expert):
        return ExpertParts(maps=(linear(what, expert),))
    if isinstance(expert, nn.Module) and not isinstance(expert, nn.ModuleList):
        return parts_of(what, expert)
    maps: list[Map] = []
    norms: dict[int, nn.Module] = {}
    listed = several(expert)
    for i, each in enumerate(listed):
        if is_norm(each) and maps:
            norms[len(maps)] = each
        else:
            maps.append(linear(f"{what}[{i}]" if len(listed) > 1 else what, each))
    if not 1 <= len(maps) <= 3:
        raise UsageError(f"{what} is a {type(expert).__name__}, not (first, second)", hint=PAIRS)
    last = norms.pop(len(maps), None)
    inner = norms.pop(1, None) if len(maps) == 2 else None
    if norms:
        raise UsageError(
            f"{what}: a normalisation stands behind one map of a gated pair",
            hint="a norm follows the first map of two, or the last one",
        )
    return ExpertParts(maps=tuple(maps), inner=inner, outer=last)


def _joined(parts: ExpertParts) -> tuple[Map, ...]:
    """The maps of an expert, of three the first two as one, the gate's outputs first."""
    if len(parts.maps) < 3:
        return parts.maps
    gate, up, last = parts.maps
    if gate[0].shape != up[0].shape:
        raise UsageError(
            f"a gated expert's first two weights are {list(gate[0].shape)} and {list(up[0].shape)}",
            hint="of three maps the first two have one shape, [h, d]",
        )
    biases = _biases([gate, up])
    both = torch.cat([gate[0], up[0]]), None if biases is None else biases.flatten()
    return both, last


def _swapped(maps: tuple[Map, ...]) -> tuple[Map, ...]:
    """The maps of an expert whose first gives up before the gate, in the order of all others."""

    def other(rows: Tensor) -> Tensor:
        return torch.cat(rows.chunk(2)[::-1])

    (weight, bias), last = maps
    return (other(weight), None if bias is None else other(bias)), last


def _norm_weights(experts: Sequence[ExpertParts]) -> NormWeights:
    """The gains and shifts of all experts, stacked."""

    def stacked(which: Literal["inner", "outer"], name: str) -> Tensor | None:
        given = [getattr(getattr(each, which), name, None) for each in experts]
        found = [each.detach().float() for each in given if each is not None]
        return torch.stack(found) if found else None

    return NormWeights(
        g1=stacked("inner", "weight"),
        s1=stacked("inner", "bias"),
        g2=stacked("outer", "weight"),
        s2=stacked("outer", "bias"),
    )


def is_weight_and_bias(given: object) -> bool:
    """Whether this is one map: a matrix with a vector, where two matrices are two maps."""
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[0], Tensor)
        and given[0].ndim > 1
        and (given[1] is None or (isinstance(given[1], Tensor) and given[1].ndim == 1))
    )


def linear(what: str, given: object) -> Map:
    """Weight and bias of a linear layer or a 1×1 convolution, or as they were given."""
    pair: Any = given
    if isinstance(given, nn.Module):
        pair = getattr(given, "weight", None), getattr(given, "bias", None)
    elif isinstance(given, Tensor):
        pair = given, None
    if not is_weight_and_bias(pair) or any(size != 1 for size in pair[0].shape[2:]):
        shown = f" of shape {list(given.shape)}" if isinstance(given, Tensor) else ""
        raise UsageError(
            f"{what} is a {type(given).__name__}{shown}, not a linear map",
            hint="give an nn.Linear, its weight [out, in], or (weight, bias)",
        )
    weight = tensor(what, pair[0], (2, 3, 4, 5), "[out, in]").flatten(1)
    return weight, vector(f"{what}'s bias", pair[1], (weight.shape[0],))


def _biases(maps: list[Map]) -> Tensor | None:
    """The biases stacked, [n, out]; None where no map has one."""
    if all(bias is None for _, bias in maps):
        return None
    return torch.stack([w.new_zeros(w.shape[0]) if bias is None else bias for w, bias in maps])


def several(given: object) -> list[Any]:
    """The entries of a list, of PyTorch's own kinds too; empty for what is none."""
    is_list = isinstance(given, list | tuple | nn.ModuleList | nn.ParameterList)
    return list(given) if is_list else []  # type: ignore[call-overload]


def tensor(what: str, given: object, ranks: tuple[int, ...] | None, expected: str) -> Tensor:
    """A tensor of one of these ranks, detached, in float32."""
    if not isinstance(given, Tensor):
        raise UsageError(f"{what} is a {type(given).__name__}, not a tensor {expected}".rstrip())
    if ranks is not None and given.ndim not in ranks:
        raise UsageError(f"{what} has the shape {list(given.shape)}, expected {expected}")
    return given.detach().to(torch.float32)


def vector(
    what: str,
    given: Tensor | None,
    expected: tuple[int, ...],
    why: str = "a number per channel",
) -> Tensor | None:
    if given is None:
        return None
    found = tensor(what, given, None, str(list(expected)))
    check_shape(what, found, expected, why)
    return found


def check_shape(what: str, given: Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(given.shape) != expected:
        raise UsageError(
            f"{what} has the shape {list(given.shape)}, expected {list(expected)}: {why}"
        )


def choice(what: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        listed = ", ".join(map(repr, get_args(choices)))
        raise UsageError(f"{what}={value!r} is not one of {listed}")
