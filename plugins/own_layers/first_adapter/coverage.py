"""Finds limits, masks and branches of a layer's forward that no trial input reached.

An adapter is compared with the layer on some inputs. Code that none of them reaches may be
missing from the adapter unnoticed.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_IN_PLACE = ("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "threshold", "nan_to_num")
LIMITS = frozenset((*_IN_PLACE, *(f"{name}_" for name in _IN_PLACE), "minimum", "maximum"))
"""Functions that change some values and leave others as they are."""

MASKS = frozenset(("where", "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_"))

COMPARISONS = frozenset(("lt", "le", "gt", "ge", "less", "greater", "__lt__", "__le__"))
COMPARISONS |= {"__gt__", "__ge__"}
"""Comparisons that make a mask."""

BOUNDS = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}
BOUNDS |= {"clip": ("min", "max"), "hardtanh": ("min_val", "max_val")}
"""The parameters of clamps after the tensor."""

Bounds = tuple[float | None, float | None]
"""The bounds of a clamp."""

Position = tuple[int, int]
"""A line of a file, and a column of it in bytes."""

Decision = ast.If | ast.While | ast.IfExp

MAX_SIZE = 2048
"""The largest number in a condition that is tried as a batch size and number of tokens."""


@dataclass(slots=True)
class WatchedLine:
    """A line of the user's code with a limit, a mask or a comparison, and its outcomes."""

    text: str
    name: str
    outcomes: set[bool] = field(default_factory=set)
    bounds: Bounds | None = None

    @property
    def description(self) -> str:
        """The line, and the outcome that did not occur."""
        if self.name not in LIMITS:
            which = "True" if self.outcomes == {False} else "False"
            return f"{self.text} (its mask was never {which})"
        return f"{self.text} (no value reached the limit)"

    def record(
        self, before: Tensor | None, returned: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Records the outcome of a call; `before` is a copy of its first argument."""
        try:
            if self.name in LIMITS:
                self.outcomes.add(before is None or not torch.equal(before, returned))
                self.bounds = self.bounds or _bounds(self.name, args, named)
                return
            values = (returned, *args, *named.values())
            masks = [v for v in values if isinstance(v, Tensor) and v.dtype == torch.bool]
            for mask in masks[:1]:
                self.outcomes |= {bool(mask.any()), bool(mask.all())}
        except RuntimeError:  # values within vmap cannot be inspected
            return


class WatchedForward(TorchFunctionMode):
    """Records what a layer's own code does in the calls within the context."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.lines: dict[tuple[str, int, str], WatchedLine] = {}
        self._layer, self._files = layer, own_files(layer)
        self._executed: dict[CodeType, set[int]] = defaultdict(set)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name not in LIMITS | MASKS | COMPARISONS:
            return func(*args, **named)
        before = args[0].clone() if args and isinstance(args[0], Tensor) else None
        returned = func(*args, **named)
        line = self._watched_line(name)
        if line is not None:
            line.record(before, returned, args, named)
        return returned

    def _watched_line(self, name: str) -> WatchedLine | None:
        """Returns the user's line that made the call; None if it is not in the layer's files."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename not in self._files:
            frame = frame.f_back
        if frame is None:
            return None
        file, line = frame.f_code.co_filename, frame.f_lineno
        return self.lines.setdefault((file, line, name), WatchedLine(_line_text(file, line), name))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what calls of the layer do within the context."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            with self:
                yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        del event, argument
        if frame.f_code.co_filename not in self._files:
            return None
        ran = self._executed[frame.f_code]
        frame.f_trace_opcodes = True  # two branches may be on one line

        def local(inner: FrameType, event: str, argument: object) -> Any:
            del event, argument
            ran.add(inner.f_lasti)
            return local

        return local

    def unreached(self) -> list[str]:
        """Returns the limits and branches that no call reached, and masks that never varied."""
        lines = [
            line.description
            for line in self.lines.values()
            if (True not in line.outcomes if line.name in LIMITS else len(line.outcomes) == 1)
        ]
        for file, node, reached in self._decisions():
            for body, what in ((node.body, "was not taken"), (node.orelse, "was always taken")):
                part = body if isinstance(body, list) else [body]
                if part and not _was_run(part[0], part[-1], reached) and not _only_raises(part):
                    lines.append(f"{_line_text(file, node.lineno)} (it {what})")
        return list(dict.fromkeys(lines))

    def _decisions(self) -> Iterator[tuple[str, Decision, set[Position]]]:
        """Yields the branches whose conditions were tested and may differ for other inputs.

        Each comes with its file and with the positions that ran there.
        """
        points: dict[str, set[Position]] = defaultdict(set)
        for code, ran in self._executed.items():
            for index, (line, _, column, _) in enumerate(code.co_positions()):
                if 2 * index in ran and line is not None and column is not None:
                    points[code.co_filename].add((line, column))
        for file, reached in points.items():
            try:
                tree = ast.parse("".join(linecache.getlines(file)))
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if (
                    isinstance(node, Decision)
                    and _was_run(node.test, node.test, reached)
                    and _may_vary(node)
                    and (
                        node.orelse or isinstance(node.body, ast.AST) or not _only_raises(node.body)
                    )
                ):
                    yield file, node, reached

    def all_lines(self) -> list[str]:
        """Returns the lines with limits, masks and branches, whatever their outcomes."""
        lines = [line.text for line in self.lines.values()]
        lines += [_line_text(file, node.lineno) for file, node, _ in self._decisions()]
        return list(dict.fromkeys(lines))

    def sizes(self) -> list[int]:
        """Returns the numbers in the conditions of branches that may be sizes."""
        found = [
            value
            for _, node, _ in self._decisions()
            for part in ast.walk(node.test)
            for value in self._values(part)
        ]
        return [size for size in dict.fromkeys(found) if type(size) is int and 1 < size <= MAX_SIZE]

    def _values(self, part: ast.AST) -> Iterator[object]:
        """Yields the values of a part of a condition: constants, attributes and globals."""
        if isinstance(part, ast.Constant):
            yield part.value
        for module in self._layer.modules():
            if isinstance(part, ast.Attribute):
                yield vars(module).get(part.attr)
            if isinstance(part, ast.Name):
                yield vars(sys.modules[type(module).__module__]).get(part.id)

    @property
    def limits(self) -> list[Bounds]:
        """The numerical bounds of clamps, in the order of their first calls."""
        found = [line.bounds for line in self.lines.values() if line.bounds is not None]
        return list(dict.fromkeys(found))


def _bounds(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> Bounds | None:
    """Returns the numerical bounds of a clamp; None for tensors and other functions."""
    names = BOUNDS.get(name.removesuffix("_"))
    if names is None:
        return None
    given = {**dict(zip(names, args[1:], strict=False)), **named}
    low, high = (given.get(end, given.get(f"{end}_val")) for end in ("min", "max"))
    if not isinstance(low, int | float | None) or not isinstance(high, int | float | None):
        return None
    return None if low is None else float(low), None if high is None else float(high)


def own_files(layer: nn.Module) -> frozenset[str]:
    """Returns the source files of the classes of a layer and its parts."""
    files = set()
    for cls in {cls for module in layer.modules() for cls in type(module).__mro__}:
        if cls.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        try:
            file = inspect.getsourcefile(cls)
        except TypeError:
            continue
        if file is not None:
            files.add(file)
    return frozenset(files)


def _line_text(file: str, line: int) -> str:
    return f"{Path(file).name} line {line}: `{linecache.getline(file, line).strip()}`"


def _was_run(first: ast.stmt | ast.expr, last: ast.stmt | ast.expr, reached: set[Position]) -> bool:
    """Whether anything ran between the start of one node and the end of another."""
    begin = first.lineno, first.col_offset
    end = last.end_lineno or last.lineno, last.end_col_offset or 0
    return any(begin <= point < end for point in reached)


def _only_raises(body: Sequence[ast.AST]) -> bool:
    return isinstance(body[-1], ast.Raise) or all(isinstance(part, ast.Pass) for part in body)


def _may_vary(node: Decision) -> bool:
    """Whether a condition may depend on the input, not only on the mode or missing arguments."""
    text = ast.unparse(node.test)
    if "training" in text or " is None" in text or " is not None" in text:
        return False
    names = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
    return bool(names - {"self"} - set(dir(builtins)))
