"""Starts an adapter from the layer's own forward, in which it marks the lines of the experts."""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeGuard

from torch import nn

from .readings import required_inputs

CALLS = (
    "(slots, combine=C)    slots [b, n, p, d], C [b, m, n, p]",
    "(x, weights=w)        x [..., d], w [..., n]",
    "(x, index, weights)   index and weights [..., k]",
)

MARK = "  # <- experts"

ATTRIBUTE = re.compile(r"\.(\w+)")

EXPERTS, LAYER = "experts", "layer"


@dataclass(frozen=True, slots=True)
class Start:
    """A forward: its parameters (the experts first), lines, imports, and the lines before it."""

    parameters: str
    lines: tuple[str, ...]
    imports: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


def start_of(layer: nn.Module, uses: frozenset[str]) -> Start:
    """Returns a layer's forward for an adapter, or a placeholder if its source cannot be read.

    `uses` are the names of the layer's attributes that contain its experts.
    """
    own = _ForwardSource.of(layer)
    if own is None:
        names = ", ".join([EXPERTS, "x", *required_inputs(layer)])
        lines = (*_help("What the layer computes", EXPERTS), "raise NotImplementedError")
        return Start(names, lines)
    bank = EXPERTS if EXPERTS not in own.names else "bank"
    layer_name = LAYER if LAYER not in own.names else "own_layer"
    return Start(
        parameters=", ".join([bank, *([own.parameters] if own.parameters else [])]),
        lines=(*_help(f"The layer's forward ({own.origin})", bank), *own.lines(layer_name, uses)),
        imports=tuple(own.imports()),
        before=() if layer_name == LAYER else (f"{layer_name} = {LAYER}",),
    )


def _help(what: str, bank: str) -> Iterator[str]:
    yield f"# {what}. Replace the lines marked '<- experts' with"
    yield "# one call, in one of three ways:"
    yield from (f"#   {bank}{call}" for call in CALLS)


@dataclass(frozen=True, slots=True)
class _ForwardSource:
    """The source of a forward: its tree, its text, its class, and its file and line."""

    tree: ast.FunctionDef
    text: str
    cls: type[nn.Module]
    origin: str

    @classmethod
    def of(cls, layer: nn.Module) -> _ForwardSource | None:
        kind = type(layer)
        try:
            lines, first = inspect.getsourcelines(kind.forward)
            file = inspect.getsourcefile(kind.forward) or ""
            text = textwrap.dedent("".join(lines))
            (tree,) = ast.parse(text).body
        except (OSError, TypeError, SyntaxError, ValueError):
            return None
        if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
            return None
        if "super(" in text and "forward" not in vars(kind):  # another class defines it
            return None
        origin = f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}, line {first}"
        return cls(tree, text, kind, origin)

    @property
    def name(self) -> str:
        """The forward's name for the layer, usually `self`."""
        return self.tree.args.args[0].arg

    @property
    def parameters(self) -> str:
        """The parameters after the layer, without their annotations."""
        arguments = copy.deepcopy(self.tree.args)
        del arguments.args[0]
        for node in ast.walk(arguments):
            if isinstance(node, ast.arg):
                node.annotation = None
        return ast.unparse(arguments)

    @property
    def names(self) -> set[str]:
        nodes = [*ast.walk(self.tree)]
        named = {node.id for node in nodes if isinstance(node, ast.Name)}
        return named | {node.arg for node in nodes if isinstance(node, ast.arg)}

    def lines(self, layer_name: str, uses: frozenset[str]) -> list[str]:
        """Returns the body's lines for this name of the layer, and marks those with experts."""
        body = self.tree.body
        first = body[1 if len(body) > 1 and ast.get_docstring(self.tree) is not None else 0]
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute | ast.Name)]
        marked = {node.end_lineno or 0 for node in nodes if self._uses(node, uses)}
        text = self.text.splitlines()
        for line, start, end, new in sorted(self._changes(nodes, layer_name), reverse=True):
            raw = text[line - 1].encode()
            text[line - 1] = (raw[:start] + new.encode() + raw[end:]).decode()
        for number in marked:
            text[number - 1] += "" if text[number - 1].endswith("\\") else MARK
        lines = text[first.lineno - 1 :]
        if not lines[0][: first.col_offset].isspace():  # on the line of its `def`
            lines[0] = lines[0][first.col_offset :]
        return textwrap.dedent("\n".join(lines)).rstrip().splitlines()

    def _changes(
        self, nodes: Sequence[ast.Attribute | ast.Name], layer_name: str
    ) -> Iterator[tuple[int, int, int, str]]:
        """Yields what replaces `self`, `super()` and names that are private to the class.

        Each item is a line, the first byte and the end of the old text there, and the new text.
        """
        for node in nodes:
            line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
            if isinstance(node, ast.Name) and node.id == self.name:
                yield line, node.col_offset, end, layer_name
            elif isinstance(node, ast.Attribute) and node.attr != self._mangled(node.attr):
                yield line, end - len(node.attr.encode()), end, self._mangled(node.attr)
        for call in ast.walk(self.tree):
            if _is_super(call) and not call.args:  # `super()` works only inside a class
                line, end = call.end_lineno or call.lineno, call.end_col_offset or 0
                yield line, call.col_offset, end, f"super({self.cls.__name__}, {layer_name})"

    def _mangled(self, name: str) -> str:
        """Returns a name as Python mangles it in the class if it begins with two underscores."""
        if not name.startswith("__") or name.endswith("__"):
            return name
        return f"_{self.cls.forward.__qualname__.split('.')[-2].lstrip('_')}{name}"

    def _uses(self, node: ast.AST, uses: frozenset[str]) -> bool:
        """Whether an attribute of the layer is its experts, or a method that uses them."""
        if not isinstance(node, ast.Attribute):
            return False
        of_bases = _is_super(node.value)
        of_layer = isinstance(node.value, ast.Name) and node.value.id == self.name
        if not of_layer and not of_bases:
            return False
        name = self._mangled(node.attr)
        kinds = self.cls.__mro__[1 if of_bases else 0 :]
        return name in uses or _method_uses(kinds, name, uses, set())

    def imports(self) -> Iterator[str]:
        """Yields the imports of the module's names that the body uses."""
        module = sys.modules.get(self.cls.__module__)
        known: Mapping[str, object] = {} if module is None else vars(module)
        parts = [*self.tree.body, *self.tree.args.defaults]
        nodes = [node for part in parts for node in ast.walk(part)]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        used -= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        own = []
        for name in sorted(used & known.keys()):
            value = known[name]
            if not isinstance(value, ModuleType):
                own.append(name)
                continue
            parent, _, last = value.__name__.rpartition(".")
            if name == value.__name__:
                yield f"import {name}"
            elif parent:
                renamed = "" if last == name else f" as {name}"
                yield f"from {parent} import {last}{renamed}"
            else:
                yield f"import {value.__name__} as {name}"
        if own:
            yield f"from {self.cls.__module__} import {', '.join(own)}"


def _is_super(node: ast.AST) -> TypeGuard[ast.Call]:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _method_uses(kinds: Sequence[type], name: str, uses: frozenset[str], visited: set[str]) -> bool:
    """Whether a method, as the first of these classes defines it, uses attributes of the layer.

    Methods that it calls count too, except those in `visited`.
    """
    method = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
    if method is None or name in visited:
        return False
    visited.add(name)
    try:
        text = inspect.getsource(method)
    except (OSError, TypeError):
        return False
    named = set(ATTRIBUTE.findall(text))
    return bool(named & uses) or any(_method_uses(kinds, other, uses, visited) for other in named)


def indent_lines(lines: Sequence[str], indent: str = "    ") -> str:
    """Returns the lines as one text, in which all but empty ones are indented."""
    return "\n".join(f"{indent}{line}" if line.strip() else "" for line in lines)
