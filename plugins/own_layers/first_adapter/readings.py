"""Finds the parts of a layer that may be its experts, and arguments that the layer accepts."""

from __future__ import annotations

import inspect
import itertools
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import FamilyError, UsageError
from ...token_routed.own_forward import result_of
from ..calls import LayerCall
from ..expert_forms import ExpertArguments, is_map
from ..ports import required_args
from .request import TriedSizes

LISTS = (nn.ModuleList, nn.Sequential, nn.ParameterList)
TABLES = (nn.ModuleDict, nn.ParameterDict)

MAX_READINGS = 12

SMALL = 1e-3
"""A factor of the last input, because normalisations differ most for tokens near 0."""


def code_of(layer: nn.Module, path: str) -> str:
    """Returns the code with which an adapter reads a layer's attribute with a dotted name."""
    code, owner = "layer", layer
    for name in path.split(".") if path else []:
        value = getattr(owner, name)
        if isinstance(owner, LISTS) and name.isdigit() and owner[int(name)] is value:
            code += f"[{name}]"
        elif isinstance(owner, TABLES):
            code += f"[{name!r}]"
        elif name.isidentifier() and not keyword.iskeyword(name):
            code += f".{name}"
        else:
            code = f"getattr({code}, {name!r})"
        owner = value
    return code


@dataclass(frozen=True, slots=True)
class ExpertsReading:
    """A candidate for a layer's experts, as arguments of a description.

    `words` describe it to the user; `problem` is the reason if the experts cannot be read. `uses`
    are the names of the layer's attributes that contain them, `own` the ids of their parameters.
    """

    keywords: str
    words: str
    count: int
    dim: int
    own: frozenset[int]
    uses: frozenset[str]
    arguments: Mapping[str, Any]
    problem: str | None = None
    matrices: int = 0
    odd: int = 0

    @property
    def listed(self) -> bool:
        """Whether the experts are modules, whose forward determines the activation."""
        return all(isinstance(part, nn.Module) for part in self.arguments.get("experts", [None]))


def readings_of(layer: nn.Module) -> list[ExpertsReading]:
    """Returns the candidates for the experts, the likeliest first; FamilyError if none."""
    found = [*map(_with_problem, (*_listed(layer), *_paired(layer), *_stacked(layer)))]
    found = sorted(found, key=lambda reading: _unlikely(reading, found, layer))[:MAX_READINGS]
    if found:
        return found
    names = ", ".join(f"{n} {list(p.shape)}" for n, p in layer.named_parameters())
    raise FamilyError(
        f"{type(layer).__name__} has no experts that moexport recognises: neither an "
        f"nn.ModuleList of modules of one class, nor stacked weights [n, in, out] ({names})",
        hint="write its adapter: docs/own-layer.md",
    )


def _unlikely(
    reading: ExpertsReading, others: Sequence[ExpertsReading], layer: nn.Module
) -> tuple[bool | int, ...]:
    """Returns a sort key: a reading with fewer signs against it sorts first."""
    around = [p.shape for p in layer.parameters() if id(p) not in reading.own]
    bare = reading.listed and all(is_map(part) for part in reading.arguments["experts"])
    routers = bare and any(
        part.weight.shape[0] == other.count
        for other in others
        if other is not reading
        for part in reading.arguments["experts"]
    )
    return (
        routers,
        "shared" in reading.keywords.lower(),
        reading.problem is not None,
        bare and len(others) > 1,
        -reading.matrices,
        not any(reading.dim in shape for shape in around),
        reading.odd,
    )


def _listed(layer: nn.Module) -> Iterator[ExpertsReading]:
    """Yields lists and dictionaries of modules of one class; nested lists count as one."""
    inside: list[str] = []
    for path, module in layer.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or not path:
            continue
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        parts = list(module.children())
        code = code_of(layer, path)
        values = f"{code}.values()" if isinstance(module, nn.ModuleDict) else code
        if parts and all(isinstance(part, nn.ModuleList) for part in parts):
            parts = [inner for part in parts for inner in part.children()]
            code = f"[expert for group in {values} for expert in group]"
        elif isinstance(module, nn.ModuleDict):
            code = f"[*{values}]"
        if len(parts) < 2 or len({type(part) for part in parts}) > 1:
            continue
        maps = [part for part in parts[0].modules() if is_map(part)]
        if not maps:
            continue
        inside.append(path)
        name, kind = code_of(layer, path), type(parts[0]).__name__
        yield ExpertsReading(
            keywords=f"experts={code}",
            words=f"{name} as {len(parts)} experts ({kind})",
            count=len(parts),
            dim=int(maps[0].weight.shape[1]),  # type: ignore[index]
            own=frozenset(map(id, module.parameters())),
            uses=frozenset([path.split(".")[0]]),
            arguments={"experts": parts},
        )


def _paired(layer: nn.Module) -> Iterator[ExpertsReading]:
    """Yields experts that have a list for each map: `zip(layer.up, layer.down)`, or three lists.

    The first map's output is the last one's input; of three maps, the first two have equal sizes.
    """
    lists = [
        (path, list(module))
        for path, module in layer.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and all(map(is_map, module))
    ]
    for number in (2, 3):
        for chosen in itertools.permutations(lists, number):
            names, parts = [path for path, _ in chosen], [maps for _, maps in chosen]
            if len({len(maps) for maps in parts}) > 1:
                continue
            shapes = [tuple(int(n) for n in maps[0].weight.shape) for maps in parts]  # type: ignore[union-attr]
            if shapes[-1][1] != shapes[0][0] or {*shapes[:-1]} != {shapes[0]}:
                continue
            codes = ", ".join(code_of(layer, path) for path in names)
            own = [p for part in itertools.chain(*parts) for p in part.parameters()]
            yield ExpertsReading(
                keywords=f"experts=[*zip({codes}, strict=True)]",
                words=f"{' and '.join(names)} as the maps of {len(parts[0])} experts",
                count=len(parts[0]),
                dim=int(shapes[0][1]),
                own=frozenset(map(id, own)),
                uses=frozenset(name.split(".")[0] for name in names),
                arguments={"experts": [*zip(*parts, strict=True)]},
                matrices=number,
                odd=_oddity(names),
            )


def _with_problem(reading: ExpertsReading) -> ExpertsReading:
    """Returns the reading, with the problem if it does not describe experts."""
    try:
        ExpertArguments(**reading.arguments).form()
    except UsageError as error:
        problem = error.message.replace("experts[", f"{reading.words.split(' as ')[0]}[", 1)
        return replace(reading, problem=problem)
    return reading


@dataclass(frozen=True, slots=True)
class _Stack:
    """The stacked matrices of all experts [n, in, out], the code that reads them, and their name.

    `listed` is code that reads them as a list, if they are not one tensor.
    """

    code: str
    tensor: Tensor
    ids: frozenset[int]
    name: str
    listed: str = ""

    def transposed(self) -> _Stack:
        listed = f"[p.mT for p in {self.listed}]" if self.listed else ""
        return replace(self, code=f"{self.code}.mT", tensor=self.tensor.mT, listed=listed)


def _stacks(layer: nn.Module) -> Iterator[_Stack]:
    for path, p in layer.named_parameters():
        if p.ndim == 3 and len(p) > 1:
            yield _Stack(code_of(layer, path), p, frozenset([id(p)]), path)
    for path, module in layer.named_modules():
        if isinstance(module, nn.ParameterList) and len(module) > 1:
            matrices, code = list(module), code_of(layer, path)
            if matrices[0].ndim == 2 and len({p.shape for p in matrices}) == 1:
                ids = frozenset(map(id, matrices))
                stacked = torch.stack(matrices)
                yield _Stack(f"torch.stack([*{code}])", stacked, ids, path, code)


def _stacked(layer: nn.Module) -> Iterator[ExpertsReading]:
    """Yields experts with stacked weights: two matrices each, or three with a gate.

    Of two, the first may contain gate and up. Yields a reading for every choice of fitting biases.
    """
    stacks = list(_stacks(layer))
    for one, two in itertools.permutations(stacks, 2):
        for first, second in itertools.product((one, one.transposed()), (two, two.transposed())):
            n, d, inner = first.tensor.shape
            gated = inner == 2 * second.tensor.shape[1]
            if len(second.tensor) != n or (not gated and inner != second.tensor.shape[1]):
                continue
            if second.tensor.shape[2] != d:
                continue
            for gates in ("concatenated", "interleaved") if gated else ("",):
                yield from _biased(layer, [first], second, gates)
            ups = [
                s
                for up in stacks
                for s in (up, up.transposed())
                if s.ids not in (first.ids, second.ids)
            ]
            for up in ups:
                if up.tensor.shape == first.tensor.shape and not gated:
                    yield from _biased(layer, [first, up], second, "concatenated")


def _biased(
    layer: nn.Module, firsts: Sequence[_Stack], second: _Stack, gate: str
) -> Iterator[ExpertsReading]:
    """Yields a reading for each choice of biases, the likeliest first."""
    n, d, _ = firsts[0].tensor.shape
    w1 = torch.cat([stack.tensor for stack in firsts], dim=-1)
    code = firsts[0].listed or firsts[0].code
    if len(firsts) > 1:
        code = f"torch.cat([{', '.join(stack.code for stack in firsts)}], dim=-1)"
    own = frozenset().union(*(stack.ids for stack in (*firsts, second)))
    named = {"w1": (code, w1), "w2": (second.listed or second.code, second.tensor)}
    choices = []
    for matrix in (w1, second.tensor):
        flat = {(n, matrix.shape[2]): "", (n, 1, matrix.shape[2]): ".squeeze(1)"}
        fitting = [
            (path, p, flat[tuple(p.shape)])
            for path, p in layer.named_parameters()
            if tuple(p.shape) in flat and id(p) not in own
        ]
        fitting.sort(key=lambda item: not _named_bias(item[0]))
        none_first = not any(_named_bias(path) for path, _, _ in fitting)
        choices.append([None, *fitting] if none_first else [*fitting, None])
    for biases in itertools.product(*choices):
        arguments = {key: tensor for key, (_, tensor) in named.items()}
        words = {key: text for key, (text, _) in named.items()}
        ids = own
        for key, bias in zip(("b1", "b2"), biases, strict=True):
            if bias is not None and id(bias[1]) not in ids:
                path, p, suffix = bias
                arguments[key] = p.squeeze(1) if suffix else p
                words[key] = f"{code_of(layer, path)}{suffix}"
                ids |= {id(p)}
        ordered = [f"{key}={words[key]}" for key in ("w1", "b1", "w2", "b2") if key in words]
        ordered += [f"gate={gate!r}"] if gate else []
        names = [stack.name for stack in (*firsts, second)]
        odd_biases = sum(not _named_bias(bias[0]) for bias in biases if bias is not None)
        yield ExpertsReading(
            keywords=", ".join(ordered),
            words=f"{' and '.join(names)} as the matrices of {n} experts",
            count=n,
            dim=d,
            own=ids,
            uses=frozenset(name.split(".")[0] for name in names),
            arguments=arguments | ({"gate": gate} if gate else {}),
            matrices=len(names),
            odd=_oddity(names) + odd_biases,
        )


LAST, UP = ("down", "w2", "wo", "out", "proj", "second", "value"), ("up", "w3")
"""Usual names of an expert's last matrix, and of the one that a gate multiplies."""


def _oddity(names: Sequence[str]) -> int:
    """Returns how unusual the names of an expert's matrices are for their order."""
    odd = sum(_named_like(name, LAST) for name in names[:-1]) - _named_like(names[-1], LAST)
    if len(names) > 2:
        odd += _named_like(names[0], UP) - _named_like(names[1], UP)
    return odd


def _named_like(path: str, words: Sequence[str]) -> bool:
    name = path.rsplit(".", maxsplit=1)[-1].lower()
    return any(word in name for word in words) and "gate" not in name


def _named_bias(path: str) -> bool:
    name = path.rsplit(".", maxsplit=1)[-1].lower()
    return "bias" in name or name.startswith("b")


# --- the arguments of a layer --------------------------------------------------------------------


def first_call(
    layer: nn.Module, reading: ExpertsReading, shape: object, sizes: TriedSizes, source: str
) -> LayerCall:
    """Returns a call of the layer on random tokens, in a layout that it accepts."""
    given = [shape] if isinstance(shape, int) else shape
    batch, tokens = sizes.batches[0], sizes.tokens[0]
    if isinstance(given, list | tuple):
        shapes = [(batch, *given)]
    else:
        shapes = [
            dims
            for d in _widths(layer, reading)
            for dims in ((batch, tokens, d), (batch, d, 3, 4), (batch, d))
        ]
    problem: Exception | None = None
    for dims in shapes:
        x = torch.randn(dims, generator=torch.Generator().manual_seed(0))
        x[-1] *= SMALL if batch > 1 else 1
        for extra in _extra_inputs(layer, x, reading.count):
            try:
                return call_of(layer, (x, *extra))
            except Exception as error:  # noqa: BLE001  the user's code may fail in any way
                problem = problem or error
    names = required_inputs(layer)
    more = f" with {', '.join(names)}" if names else ""
    raise UsageError(
        f"{source}: its forward rejects tokens {list(shapes[0])}{more}: {type(problem).__name__}: "
        f"{problem} (moexport read {reading.words}, for tokens of width {reading.dim})",
        hint="--set input_shape=… sets the input's shape without the batch, --batch and --tokens "
        "set sizes; inputs after the tokens other than masks [b, m], tokens [b, m, d], vectors "
        "[b, d] or logits [b, m, n] need an adapter with a forward (docs/own-layer.md)",
    )


def call_of(layer: nn.Module, args: tuple[Any, ...]) -> LayerCall:
    """Calls the layer with these arguments; raises its errors, and ValueError for NaN."""
    with torch.no_grad():
        returned = layer(*(value.clone() for value in args))
    y = result_of(returned)
    if y is None or not bool(y.isfinite().all()):
        raise ValueError("it returns no finite tensor")
    return LayerCall(
        args=args,
        named={},
        y=y.detach().clone(),
        structure=None if isinstance(returned, Tensor) else returned,
    )


def _widths(layer: nn.Module, reading: ExpertsReading) -> list[int]:
    """Returns possible widths of tokens, the likeliest first; a layer may split or map tokens."""
    linears = [int(m.weight.shape[1]) for m in layer.modules() if isinstance(m, nn.Linear)]
    numbers = [
        value
        for value in vars(layer).values()
        if isinstance(value, int) and not isinstance(value, bool) and 1 < value <= 1 << 14
    ]
    whole = [reading.dim * number for number in numbers if number <= 64]
    return list(dict.fromkeys([reading.dim, *linears, *whole, *numbers]))[:24]


def required_inputs(layer: nn.Module) -> list[str]:
    """Returns the required positional arguments of a layer's forward after its tokens."""
    parameters = inspect.signature(layer.forward).parameters
    named = {n for n, each in parameters.items() if each.kind is Parameter.KEYWORD_ONLY}
    return [name for name in required_args(layer)[1:] if name not in named]


def optional_inputs(layer: nn.Module) -> list[str]:
    """Returns the optional arguments of a layer's forward after its tokens."""
    parameters = [*inspect.signature(layer.forward).parameters.values()][1:]
    return [p.name for p in parameters if p.default is not Parameter.empty]


def _extra_inputs(layer: nn.Module, x: Tensor, experts: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields possible arguments after the tokens: masks, tokens, logits and vectors."""
    sizes = [x.shape, (*x.shape[:-1], experts), (len(x), x.shape[-1])]
    generator = torch.Generator().manual_seed(1)
    floats = [torch.randn(size, generator=generator) for size in dict.fromkeys(map(tuple, sizes))]
    masks = [_mask(x.shape[:-1])]
    yield from itertools.product([*masks, *floats], repeat=len(required_inputs(layer)))


def _mask(shape: Sequence[int]) -> Tensor:
    mask = torch.ones(*shape, dtype=torch.bool)
    mask.flatten()[1::3] = False  # some tokens of every input, and never all
    return mask


def resized(call: LayerCall, batch: int, tokens: int | None) -> tuple[Any, ...]:
    """Returns arguments like a call's for another batch size and number of tokens [b, m, …]."""
    b, generator = len(call.x), torch.Generator().manual_seed(2)
    m = call.x.shape[1] if call.x.ndim == 3 else None

    def sized(value: Tensor) -> Tensor:
        shape = list(value.shape)
        if shape and shape[0] == b:
            shape[0] = batch
        if m is not None and tokens is not None and len(shape) > 1 and shape[1] == m:
            shape[1] = tokens
        if value.dtype == torch.bool:
            return _mask(shape)
        return torch.randn(shape, generator=generator)

    return tuple(sized(value) for value in call.args)
