"""A first adapter for a layer: its experts are read, and what is around them is guessed.

Each guess is a text that is run as a user's would be, and compared with what the layer gives. One
that matches is the adapter; without one it is said which part was not recognised.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ...common.user_code import module_made
from ...errors import FamilyError, MoexportError, UsageError
from .calls import LayerCall
from .comparison import result_of_code, surroundings
from .descriptions import Description, SoftMoEDescription, held_by
from .examples import INPUT_SHAPE
from .expert_forms import is_map, is_norm, parts_of
from .mismatch import CLOSE, difference
from .own_forward import result_of

INPUTS, TOKENS = 3, 7
"""Those that a layer is tried on where no shape is given."""

SMALL = 1e-3
"""The last input is multiplied by it: short tokens tell normalisations apart."""

ARGUMENTS = "--set gives its arguments: --set dim=64 --set num_experts=8"

MOST_WIDTH = 1 << 16


@dataclass(frozen=True, slots=True)
class FirstAdapter:
    """An adapter as Python code; `missing` says what was not recognised, empty where it matches."""

    code: str
    missing: tuple[str, ...]


def first_adapter(source: str, config: Mapping[str, Any]) -> FirstAdapter:
    """Returns an adapter for the layer that `package.module:Class` makes with `config`.

    Raises UsageError where it cannot be made or called, and FamilyError where it holds no experts.
    """
    arguments = {key: value for key, value in config.items() if key != INPUT_SHAPE}
    torch.manual_seed(0)
    layer = module_made(source, "a layer", arguments, ARGUMENTS)
    layer = layer.float().eval().requires_grad_(False)
    for parameter in layer.parameters():  # zeros and ones hide what multiplies and adds
        if parameter.ndim < 2 or float(parameter.std()) == 0:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    found = _Experts.of(layer)
    call = _called(layer, found.dim, found.count, config.get(INPUT_SHAPE), source)
    return _Search(layer, found, call, source).result()


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a layer, as arguments of a description; `problem` if they cannot be read."""

    keywords: str
    count: int
    dim: int
    own: frozenset[int]
    problem: str | None = None

    @classmethod
    def of(cls, layer: nn.Module) -> _Experts:
        for name, module in layer.named_modules():
            listed = list(module) if isinstance(module, nn.ModuleList) else []
            if len(listed) < 2 or len({type(module) for module in listed}) > 1:
                continue
            maps = [part for part in listed[0].modules() if is_map(part)]
            if not maps or not name or "." in name:
                continue
            own = frozenset(id(parameter) for parameter in module.parameters())
            width = int(maps[0].weight.shape[1])  # type: ignore[index]
            problem = None
            try:
                if not is_map(listed[0]):
                    parts_of(f"layer.{name}[0]", listed[0])
            except UsageError as error:
                problem = error.message
            keyword = f"experts=layer.{name}"
            return cls(keyword, len(listed), width, own, problem)
        return cls._stacked(layer)

    @classmethod
    def _stacked(cls, layer: nn.Module) -> _Experts:
        """Experts whose weights are two stacked parameters."""
        stacks = [(n, p) for n, p in layer.named_parameters() if p.ndim == 3 and len(p) > 1]
        for (one, first), (two, second) in itertools.permutations(stacks, 2):
            for turn, other in itertools.product((False, True), repeat=2):
                w1, w2 = first.mT if turn else first, second.mT if other else second
                if len(w1) != len(w2) or w1.shape[2] != w2.shape[1] or w1.shape[1] != w2.shape[2]:
                    continue
                w1_text = f"w1=layer.{one}{'.mT' if turn else ''}"
                w2_text = f"w2=layer.{two}{'.mT' if other else ''}"
                keywords, own = [w1_text, w2_text], {id(first), id(second)}
                for key, matrix in (("b1", w1), ("b2", w2)):
                    for name, p in layer.named_parameters():
                        size = (len(w1), matrix.shape[2])
                        flat = {size: "", (size[0], 1, size[1]): ".squeeze(1)"}
                        if tuple(p.shape) in flat and id(p) not in own and "." not in name:
                            keywords.append(f"{key}=layer.{name}{flat[tuple(p.shape)]}")
                            own.add(id(p))
                            break
                return cls(", ".join(keywords), len(w1), w1.shape[1], frozenset(own))
        names = ", ".join(f"{n} {list(p.shape)}" for n, p in layer.named_parameters())
        raise FamilyError(
            f"{type(layer).__name__} holds no experts that moexport recognises: neither an "
            f"nn.ModuleList of modules of one class, nor stacked weights [n, in, out] ({names})",
            hint="write its adapter: docs/own-layer.md",
        )


def _called(layer: nn.Module, dim: int, experts: int, shape: object, source: str) -> LayerCall:
    """A call of the layer on random tokens, in the layout that it takes."""
    sizes = [shape] if isinstance(shape, int) else shape
    shapes = [(INPUTS, *sizes)] if isinstance(sizes, list | tuple) else _shapes(dim)
    problem: Exception | None = None
    for dims in shapes:
        x = torch.randn(dims, generator=torch.Generator().manual_seed(0))
        x[-1] *= SMALL
        for further in _further(layer, x, experts):
            try:
                with torch.no_grad():
                    returned = layer(x.clone(), *(value.clone() for value in further))
            except Exception as error:  # noqa: BLE001  the user's code may fail in any way
                problem = problem or error
                continue
            y = result_of(returned)
            if y is not None and bool(y.isfinite().all()):
                structure = None if isinstance(returned, Tensor) else returned
                return LayerCall(args=(x, *further), named={}, y=y, structure=structure)
    names = further_inputs(layer)
    more = f" with {', '.join(names)}" if names else ""
    raise UsageError(
        f"{source}: its forward takes no tokens {list(shapes[0])}{more}: {type(problem).__name__}: "
        f"{problem}",
        hint="--set input_shape=… gives what it takes, without the batch; further inputs that are "
        "no mask [b, m], tokens [b, m, d], vectors [b, d] or logits [b, m, n] need an adapter with "
        "a forward (docs/own-layer.md)",
    )


def further_inputs(layer: nn.Module) -> list[str]:
    """Returns what the forward of a layer must be given after its tokens."""
    parameters = [*inspect.signature(layer.forward).parameters.values()][1:]
    wanted = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in wanted and p.default is Parameter.empty]


def _further(layer: nn.Module, x: Tensor, experts: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields what a layer may be given after its tokens: masks, tokens, logits or vectors."""
    mask = torch.ones(x.shape[:-1], dtype=torch.bool)
    mask.flatten()[1::3] = False  # some tokens of every input, and never all
    sizes = [x.shape, (*x.shape[:-1], experts), (len(x), x.shape[-1])]
    generator = torch.Generator().manual_seed(1)
    floats = [torch.randn(size, generator=generator) for size in dict.fromkeys(map(tuple, sizes))]
    yield from itertools.product([mask, *floats], repeat=len(further_inputs(layer)))


def _shapes(dim: int) -> list[tuple[int, ...]]:
    return [(INPUTS, TOKENS, dim), (INPUTS, dim, 3, 4), (INPUTS, dim)]


def _distance(expected: Tensor, actual: Tensor | None) -> float:
    """How far off a result is, in the input where that is most; infinite where it is none."""
    if actual is None or actual.shape != expected.shape:
        return inf
    return max(difference(a, b) for a, b in zip(expected, actual, strict=True))


class _Search:
    """The guesses for one layer."""

    def __init__(self, layer: nn.Module, experts: _Experts, call: LayerCall, source: str) -> None:
        self.layer, self.experts, self.call, self.source = layer, experts, call, source
        self.further = dict(zip(further_inputs(layer), call.further, strict=False))
        self.nearest: dict[str, float] = {}

    def result(self) -> FirstAdapter:
        """Returns the first guess that matches, or a frame with what is missing."""
        if self.experts.problem is None:
            for body in itertools.chain(self._soft_moe(), self._routed()):
                if (off := self._off(body)) <= CLOSE:
                    return FirstAdapter(self._whole(body), ())
                self.nearest[body] = off
        return FirstAdapter(self._whole(self._frame()), tuple(self._missing()))

    def _whole(self, body: str) -> str:
        name, where = type(self.layer).__name__, type(self.layer).__module__
        imports = ["import moexport"]
        imports += ["import torch"] if "torch." in body else []
        imports += ["from torch.nn import functional as F"] if "F." in body else []
        lines = [*imports, f"from {where} import {name}", "", ""]
        lines += [f"@moexport.adapts({name})", f"def adapt(layer: {name}):"]
        return "\n".join([*lines, *(f"    {line}".rstrip() for line in body.splitlines())]) + "\n"

    def _described(self, body: str) -> Description | None:
        """What the text of an adapter returns."""
        import moexport

        lines = "\n".join(f"    {line}" for line in body.splitlines())
        known: dict[str, Any] = {"moexport": moexport, "torch": torch, "F": nn.functional}
        try:
            exec(f"def adapt(layer):\n{lines}", known)
            described: Description = known["adapt"](self.layer)
        except (MoexportError, RuntimeError, AttributeError, TypeError):
            return None
        return described

    def _off(self, body: str) -> float:
        """How far off a text is from what the layer gives; infinite where it does not run."""
        description = self._described(body)
        return inf if description is None else _distance(self.call.y, self._result(description))

    def _result(self, description: Description) -> Tensor | None:
        """What a description gives for the call; None where it does not run."""
        with torch.no_grad():
            try:
                if isinstance(description, SoftMoEDescription):
                    ours = surroundings(description, self.call)(description.build(""))
                    return result_of(ours(self.call.x))
                return result_of_code(description, self.call, self.source)[1]
            except (MoexportError, RuntimeError):
                return None

    # --- Soft MoE -----------------------------------------------------------------------------

    def _soft_moe(self) -> Iterator[str]:
        """Yields texts of Soft MoE layers that match, those with the fewest options first."""
        if self.call.further:
            yield from self._masked()
            return
        held, described = held_by(self.layer), {}
        for phi, norm in itertools.product(self._phis(), ["", *self._norms()]):
            options = [f"phi={phi[0]}", *phi[1:], self.experts.keywords]
            options += [f"norm={norm}"] if norm else []
            description = self._described(_call("moexport.SoftMoE", options))
            if isinstance(description, SoftMoEDescription):
                described[phi, norm] = options, [*description.variants(held)]
        for simple in (True, False):
            for (phi, norm), (options, variants) in described.items():
                for changed, variant in variants:
                    if simple == (len(changed) < 2):
                        yield from self._of_variant(phi, norm, options, changed, variant)

    def _of_variant(
        self,
        phi: tuple[str, ...],
        norm: str,
        options: list[str],
        changed: Mapping[str, str],
        variant: Description,
    ) -> Iterator[str]:
        """Yields the text of a description with changed options where that matches."""
        ours, x, y = self._result(variant), self.call.x, self.call.y
        added = None if ours is None or x.shape != ours.shape else x + ours
        residual = _distance(y, added) <= CLOSE
        if not residual and (off := _distance(y, ours)) > CLOSE:
            if not changed:
                self.nearest[_call("moexport.SoftMoE", options)] = off
            return
        if _DISPATCH in changed:
            if not residual and phi[1:] == ():
                yield self._with_axes(changed, phi[0], norm)
            return
        named = {k: v.replace("phi", phi[0]) if k == "phi" else v for k, v in changed.items()}
        if any(" " in key for key in named):
            return
        kept = [option for option in options if option.split("=", 1)[0] not in changed]
        more = [f"{key}={value}" for key, value in named.items()]
        last = ["residual=True"] if residual else []
        yield _call("moexport.SoftMoE", [*kept, *more, *last])

    def _masked(self) -> Iterator[str]:
        """Yields texts of Soft MoE layers with a mask of tokens as a further input."""
        for (phi, *more), norm, mask, end in itertools.product(
            self._phis(), ["", *self._norms()], self._masks(), _ENDS
        ):
            if more:
                continue
            hidden = f'logits.masked_fill({mask}[:, :, None, None], float("-inf"))'
            lines = [f"h = {norm}(x)"] if norm else []
            h = "h" if norm else "x"
            lines += [
                f'logits = torch.einsum("bmd,dnp->bmnp", {h}, {phi})',
                f"dispatch = {hidden}.softmax(dim=1)",
                f'slots = torch.einsum("bmd,bmnp->bnpd", {h}, dispatch)',
                f"y = experts(slots, combine={_AXES['all slots']})",
                f"return {end.format(mask=mask)}",
            ]
            yield self._text(lines, "gelu")

    def _masks(self) -> list[str]:
        """What is True at tokens that do not count, as code."""
        return [
            turn + name
            for name, value in self.further.items()
            if value.dtype == torch.bool
            for turn in ("~", "")
        ]

    def _text(self, lines: Sequence[str], activation: str = "", k: str = "") -> str:
        """The text of experts with a forward of these lines."""
        names = ", ".join(["experts", "x", *self.further, *([f"k={k}"] if k else [])])
        listed = self.experts.keywords.startswith("experts=")
        more = [f"activation='{activation}'"] if activation and not listed else []
        call = _call("moexport.Experts", [self.experts.keywords, *more, "forward=forward"])
        return "\n".join([f"def forward({names}):", *(f"    {x}" for x in lines), "", call])

    def _with_axes(self, changed: Mapping[str, str], phi: str, norm: str) -> str:
        """The text of a layer with its softmaxes over other axes."""
        dispatch, combine = (_AXES[changed[key].removeprefix("over ")] for key in changed)
        lines = [f"x = {norm}(x)"] if norm else []
        lines += [
            f'logits = torch.einsum("bmd,dnp->bmnp", x, {phi})',
            f'slots = torch.einsum("bmd,bmnp->bnpd", x, {dispatch})',
            f"return experts(slots, combine={combine})",
        ]
        # What a Soft MoE's experts compute unless it is said.
        return self._text(lines, "gelu")

    def _phis(self) -> Iterator[tuple[str, ...]]:
        """Yields what the tokens may be multiplied with, [d, n, p], as code, and a bias."""
        d, n = self.experts.dim, self.experts.count
        raw: list[str] = []
        for name, p in self._others():
            raw += [f"layer.{name}{turn}" for turn in _turns(tuple(p.shape), d, n)]
        for name in vars(type(self.layer)):
            method = getattr(self.layer, name, None)
            if name.startswith("_") or name == "forward" or not callable(method):
                continue
            try:
                made = method()
            except Exception:  # noqa: BLE001  a method may want anything
                continue
            if isinstance(made, Tensor):
                raw += [f"layer.{name}(){turn}" for turn in _turns(tuple(made.shape), d, n)]
        yield from ((name,) for name in raw)
        scalars = [name for name, p in self._others() if p.numel() == 1]
        for phi in raw:
            yield from ((f"layer.{name} * F.normalize({phi}, dim=0)",) for name in scalars)
            module = phi.removeprefix("layer.").partition(".weight")[0]
            if ".weight" in phi and hasattr(self.layer, module):
                bias = getattr(getattr(self.layer, module), "bias", None)
                if bias is not None:
                    yield phi, f"bias=layer.{module}.bias"

    def _norms(self) -> list[str]:
        d = self.experts.dim
        return [
            f"layer.{name}"
            for name, module in self.layer.named_children()
            if is_norm(module) and tuple(module.normalized_shape) == (d,)  # type: ignore[arg-type]
        ]

    def _others(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are none of the experts'."""
        named = self.layer.named_parameters()
        return [(name, p) for name, p in named if id(p) not in self.experts.own]

    # --- experts that a router chooses --------------------------------------------------------

    def _routed(self) -> Iterator[str]:
        """Yields texts of layers that choose experts for tokens."""
        ends = ["", *(f"y.masked_fill({mask}[..., None], 0)" for mask in self._masks())]
        for gate, norm, form, before, end in itertools.product(
            self._gates(), ["", *self._norms()], _FORMS, self._added(), ends
        ):
            h = "h" if norm else "x"
            *steps, last = form.format(logits=gate.format(x=h), k="k").splitlines()
            y = f"{before.format(h=h)}{last.replace('(x,', f'({h},')}"
            lines = [f"h = {norm}(x)"] if norm else []
            lines += [*steps, *([f"y = {y}", f"return {end}"] if end else [f"return {y}"])]
            for k in self._ks() if "{k}" in form else [""]:
                for activation in self._activations():
                    yield self._text(lines, activation, k)

    def _activations(self) -> Sequence[str]:
        if self.experts.keywords.startswith("experts="):
            return [""]
        return ["silu", "gelu", "relu", "relu2"]

    def _gates(self) -> Iterator[str]:
        """Yields a router's logits as code, of `{x}` or of a further input."""
        d, n, x = self.experts.dim, self.experts.count, self.call.x
        seen = ["{x}"]
        for name, value in self.further.items():
            if value.shape == (*x.shape[:-1], n):
                yield name
            elif value.shape == x.shape and value.is_floating_point():
                seen.append(name)
            elif value.shape == (len(x), d):
                seen.append(f"{name}.unsqueeze(1).expand_as(x)")
        for (name, module), value in itertools.product(self.layer.named_modules(), seen):
            if isinstance(module, nn.Linear) and module.weight.shape == (n, d):
                yield f"layer.{name}({value})"
        for (name, p), value in itertools.product(self._others(), seen):
            if p.shape == (d, n):
                yield f"({value} @ layer.{name})"
            elif p.shape == (n, d) and not name.endswith(".weight"):
                yield f"({value} @ layer.{name}.T)"

    def _ks(self) -> list[str]:
        """The numbers that may be k, as code."""
        n = self.experts.count
        held = [
            f"layer.{name}"
            for name, value in vars(self.layer).items()
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < n
        ]
        return held or [str(k) for k in range(1, min(n, 5))]

    def _added(self) -> list[str]:
        """What may be added to the experts' sum, as code."""
        shared = []
        for name, module in self.layer.named_children():
            own = any(id(p) in self.experts.own for p in module.parameters())
            if own or is_norm(module) or not any(True for _ in module.parameters()):
                continue
            if isinstance(module, nn.ModuleList):
                shared.append(f"sum(f({{h}}) for f in layer.{name}) + ")
            elif self._keeps_width(module):
                shared.append(f"layer.{name}({{h}}) + ")
        out = self.call.y.shape[-1]
        shared += [f"layer.{name} + " for name, p in self._others() if tuple(p.shape) == (out,)]
        return ["", "x + ", *shared, *(f"x + {text}" for text in shared)]

    def _keeps_width(self, module: nn.Module) -> bool:
        try:
            y = module(self.call.x)
        except Exception:  # noqa: BLE001  a module may want anything
            return False
        return isinstance(y, Tensor) and y.shape == self.call.y.shape

    # --- what was not recognised --------------------------------------------------------------

    def _missing(self) -> Iterator[str]:
        if self.experts.problem is not None:
            yield f"the experts: {self.experts.problem}"
            return
        tried = sorted(self.nearest.items(), key=lambda item: item[1])
        if not tried or tried[0][1] == inf:
            others = ", ".join(f"{name} {list(p.shape)}" for name, p in self._others())
            yield f"the router: none of the other parameters fits one ({others or 'none'})"
            return
        off = tried[0][1]
        given = ", ".join(self.further)
        around = "what is around the experts" + (f", with {given}" if given else "")
        yield (
            f"{around}: {len(tried)} usual forms were tried, and the nearest is "
            f"off by {off:.2g} of max|y|"
        )

    def _frame(self) -> str:
        return self._text(
            [
                "# What the layer computes, with one of these in place of its experts:",
                "#   experts(slots, combine=C)    slots [b, n, p, d], C [b, m, n, p]",
                "#   experts(x, weights=w)        x [..., d], w [..., n]",
                "#   experts(x, index, weights)   index and weights [..., k]",
                "raise NotImplementedError",
            ]
        )


_DISPATCH = "the softmax of dispatch"

_ENDS = (
    "y",
    "x + y",
    "y.masked_fill({mask}[..., None], 0)",
    "x + y.masked_fill({mask}[..., None], 0)",
    "(x + y).masked_fill({mask}[..., None], 0)",
)
"""What is returned of y where a mask says which tokens count."""

_AXES = {
    "all slots": "logits.flatten(2).softmax(dim=-1).view_as(logits)",
    "the experts": "logits.softmax(dim=2)",
    "an expert's slots": "logits.softmax(dim=3)",
    "the tokens": "logits.softmax(dim=1)",
}
"""Softmaxes of L [b, m, n, p] as code, by what they are over."""

_FORMS = (
    "w = {logits}.softmax(dim=-1)\nexperts(x, weights=w)",
    "w, index = {logits}.softmax(dim=-1).topk({k}, dim=-1)\n"
    "w = w / w.sum(dim=-1, keepdim=True)\nexperts(x, index, w)",
    "w, index = {logits}.topk({k}, dim=-1)\nexperts(x, index, w.softmax(dim=-1))",
    "w, index = {logits}.softmax(dim=-1).topk({k}, dim=-1)\nexperts(x, index, w)",
    "w, index = {logits}.sigmoid().topk({k}, dim=-1)\nexperts(x, index, w)",
    "w, index = {logits}.sigmoid().topk({k}, dim=-1)\n"
    "w = w / w.sum(dim=-1, keepdim=True)\nexperts(x, index, w)",
)
"""Ways to choose experts by logits: all of them, or k."""


def _turns(shape: tuple[int, ...], d: int, n: int) -> list[str]:
    """Code that makes a tensor of this shape [d, n, p], if it can be."""
    if len(shape) == 3:
        orders = [
            order
            for order in itertools.permutations(range(3))
            if (shape[order[0]], shape[order[1]]) == (d, n)
        ]
        return ["" if order == (0, 1, 2) else f".permute{order}" for order in orders]
    if len(shape) != 2:
        return []
    turns = []
    for rows, columns, turn in ((*shape, ""), (*shape[::-1], ".T")):
        if rows == d and columns % n == 0 and columns < MOST_WIDTH:
            p = columns // n
            turns.append(turn if p == 1 else f"{turn}.unflatten(1, ({n}, {p}))")
    return turns


def _call(name: str, options: Sequence[str]) -> str:
    """A return of a call, on several lines where it is long."""
    one = f"return {name}({', '.join(options)})"
    if len(one) <= 90:
        return one
    return "\n".join([f"return {name}(", *(f"    {option}," for option in options), ")"])
