"""The candidates for an adapter around a reading of the experts, as text, and their results.

A text runs like a user's adapter. Cheap checks come first: if a router chooses the experts, whether
any weights of their outputs can produce y.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from ....common.console import Progress
from ....errors import MoexportError
from ..calls import LayerCall
from ..comparison import result_of_description
from ..descriptions import Description, ExpertsDescription, numbers_in
from ..expert_forms import is_norm
from ..mismatch import difference, weights_that_fit
from .coverage import Bounds
from .readings import ExpertsReading, code_of, required_inputs
from .start import indent_lines

USER_CODE_ERRORS = (MoexportError, RuntimeError, AttributeError, TypeError, ValueError, LookupError)
"""The exceptions that a wrong guess may raise."""


def distance(expected: Tensor, actual: Tensor | None) -> float:
    """Returns the largest error of an input's result; infinite without a result."""
    if actual is None or actual.shape != expected.shape:
        return inf
    return max(difference(a, b) for a, b in zip(expected, actual, strict=True))


STEP_EVERY = 50
"""The number of forms tried between two progress messages."""


class OutOfTimeError(Exception):
    """Raised when a search has used up its time."""


class FormCount:
    """Counts the forms tried for a reading, and records the error of the best (`nearest`).

    `deadline` is the CPU time (`time.process_time`) after which no more forms are tried.
    """

    def __init__(self, progress: Progress, what: str, deadline: float = inf) -> None:
        self.forms, self.nearest = 0, inf
        self._progress, self._what, self._deadline = progress, what, deadline
        self.report("reading its forward")

    def report(self, step: str) -> None:
        """Reports the current step; raises `OutOfTimeError` if there is no time for it."""
        if process_time() > self._deadline:
            raise OutOfTimeError
        self._progress.step(f"{self._what}: {step}")

    def add(self, off: float = inf) -> None:
        """Counts a form with this error; raises `OutOfTimeError` like `report`."""
        self.forms += 1
        self.nearest = min(self.nearest, off)
        if process_time() > self._deadline:
            raise OutOfTimeError
        if self.forms % STEP_EVERY == 0:
            self.report(f"{self.forms} forms")


@dataclass(frozen=True, slots=True)
class Guess:
    """A layer, a reading of its experts, and a call of the layer to compare adapters with."""

    layer: nn.Module
    reading: ExpertsReading
    call: LayerCall
    source: str
    count: FormCount

    @property
    def extra_inputs(self) -> dict[str, Tensor]:
        """The layer's arguments after its tokens, by name."""
        return dict(zip(required_inputs(self.layer), self.call.extra_args, strict=False))

    def value(self, code: str, names: Mapping[str, Any]) -> Any:
        """Returns the value of code with these names and the layer; None if it does not run."""
        try:
            return eval(code, {"layer": self.layer, "torch": torch, "F": nn.functional, **names})
        except USER_CODE_ERRORS:
            return None

    def describe(self, body: str) -> Description | None:
        """Runs the text of an adapter and returns its result; None if it does not run."""
        import moexport

        known: dict[str, Any] = {"moexport": moexport, "torch": torch, "F": nn.functional}
        try:
            exec(f"def adapt(layer):\n{indent_lines(body.splitlines())}", known)
            description: Description = known["adapt"](self.layer)
        except USER_CODE_ERRORS:
            return None
        return description

    def result(self, description: Description | None, call: LayerCall) -> Tensor | None:
        """Returns a description's result for a call; None if it does not run."""
        if description is None:
            return None
        with torch.no_grad():
            try:
                return result_of_description(description, call, self.source)
            except USER_CODE_ERRORS:
                return None

    def error_of(self, body: str) -> float:
        """Returns the error of a text's result; infinite if the text does not run."""
        return distance(self.call.y, self.result(self.describe(body), self.call))

    @property
    def other_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters outside the experts, by the code that reads them."""
        return [
            (code_of(self.layer, name), p)
            for name, p in self.layer.named_parameters()
            if id(p) not in self.reading.own
        ]

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The layer's modules outside the experts, by the code that reads them."""
        return [
            (code_of(self.layer, path), module)
            for path, module in self.layer.named_modules()
            if path and not any(id(p) in self.reading.own for p in module.parameters())
        ]

    @property
    def linears(self) -> list[tuple[str, int, int]]:
        """The linear maps outside the experts, with the widths of their outputs and inputs."""
        linears = [(code, m.weight) for code, m in self.modules if isinstance(m, nn.Linear)]
        return [(code, *weight.shape) for code, weight in linears]

    @property
    def norms(self) -> list[str]:
        """The normalisations of tokens outside the experts, as code."""
        dim = (self.reading.dim,)
        return [c for c, m in self.modules if is_norm(m) and tuple(m.normalized_shape) == dim]

    @property
    def masks(self) -> list[str]:
        """Masks that may be True at ignored tokens, as code."""
        named = self.extra_inputs.items()
        return [sign + n for n, v in named if v.dtype == torch.bool for sign in ("~", "")]

    def numbers(self) -> dict[str, float]:
        """Returns the numbers in the layer and its parts, by the code that reads them."""
        found: dict[str, float] = {}
        for code, module in (("layer", self.layer), *self.modules):
            for name, value in numbers_in(module).items():
                found.setdefault(f"{code}.{name}", value)
        found |= {code: float(p) for code, p in self.other_parameters if p.numel() == 1}
        return found

    def text(self, lines: Sequence[str], activation: str = "", k: str = "") -> str:
        """Returns the text of an adapter whose forward has these lines."""
        names = ", ".join(["experts", "x", *self.extra_inputs, *([f"k={k}"] if k else [])])
        more = [f"activation={activation!r}"] if activation and not self.reading.listed else []
        call = call_text("moexport.Experts", [self.reading.keywords, *more, "forward=forward"])
        return "\n".join([f"def forward({names}):", indent_lines(lines), "", call])


def call_text(name: str, options: Sequence[str]) -> str:
    """Returns a `return` statement with a call, on several lines if it is long."""
    line = f"return {name}({', '.join(options)})"
    if len(line) <= 90:
        return line
    return "\n".join([f"return {name}(", *(f"    {option}," for option in options), ")"])


def clamped(code: str, limit: Bounds | None) -> str:
    """Returns code followed by a clamp."""
    if limit is None:
        return code
    low, high = limit
    bounds = [f"min={low:g}"] if low is not None else []
    bounds += [f"max={high:g}"] if high is not None else []
    return f"{code}.clamp({', '.join(bounds)})"


# --- experts that a router chooses ----------------------------------------------------------------

FORMS = (
    "w = {logits}.softmax(dim=-1)\nexperts(x, weights=w)",
    "w, index = {logits}.softmax(dim=-1).topk({k}, dim=-1)\n"
    "w = w / w.sum(dim=-1, keepdim=True)\nexperts(x, index, w)",
    "w, index = {logits}.topk({k}, dim=-1)\nexperts(x, index, w.softmax(dim=-1))",
    "w, index = {logits}.softmax(dim=-1).topk({k}, dim=-1)\nexperts(x, index, w)",
    "w, index = {logits}.sigmoid().topk({k}, dim=-1)\nexperts(x, index, w)",
    "w, index = {logits}.sigmoid().topk({k}, dim=-1)\n"
    "w = w / w.sum(dim=-1, keepdim=True)\nexperts(x, index, w)",
    "w = {logits}.sigmoid()\nexperts(x, weights=w)",
    "w = {logits}.relu()\nexperts(x, weights=w)",
    "w, index = {logits}.topk({k}, dim=-1)\nexperts(x, index, w)",
)
"""Ways to weight all experts by logits, or to choose k of them."""

CORRECTED = (
    "scores = {logits}.{squash}\nindex = (scores + {bias}).topk({k}, dim=-1).indices\n"
    "w = scores.gather(-1, index)\nexperts(x, index, w)",
    "scores = {logits}.{squash}\nindex = (scores + {bias}).topk({k}, dim=-1).indices\n"
    "w = scores.gather(-1, index)\nw = w / w.sum(dim=-1, keepdim=True)\nexperts(x, index, w)",
)
"""Ways to choose experts with a bias that does not affect their weights."""

SHARED_ACTIVATIONS = ("F.gelu", "F.relu", "F.silu")

GATE_ACTIVATIONS = (
    *("F.relu({})", "F.gelu({})", "torch.tanh({})", "F.silu({})", "{}", "torch.sigmoid({})"),
    *("F.leaky_relu({})", "F.elu({})"),
)
"""The functions that may be between the two maps of a router."""

CodeOfMap = tuple[str, int, int]
"""A linear map as code, with `{}` for its input, and its input and output widths."""

MAX_ADDENDS = 200


@dataclass(frozen=True, slots=True)
class RoutedForm:
    """One way to compute a layer whose router chooses experts, as code."""

    gate: str
    form: str
    norm: str = ""
    added: str = ""
    scale: str = ""
    mask: str = ""
    k: str = ""
    activation: str = ""
    limits: tuple[tuple[str, Bounds], ...] = ()

    def lines(self) -> list[str]:
        limits = dict(self.limits)
        h = "h" if self.norm else "x"
        lines = [f"x = {clamped('x', limits['x'])}"] if "x" in limits else []
        lines += [f"h = {self.norm}(x)"] if self.norm else []
        logits = clamped(self.gate.format(x=h), limits.get("logits"))
        *steps, last = self.form.format(logits=logits, k="k").splitlines()
        lines += steps
        if "weights" in limits:
            lines.append(f"w = {clamped('w', limits['weights'])}")
        bank = last.replace("(x,", f"({h},")
        bank = f"{self.scale} * {bank}" if self.scale else bank
        y = f"{self.added.format(h=h)} + {bank}" if self.added else bank
        if "y" in limits:
            y = clamped(f"({y})", limits["y"])
        if self.mask:
            return [*lines, f"y = {y}", f"return y.masked_fill({self.mask}[..., None], 0)"]
        return [*lines, f"return {y}"]


class RoutedForms:
    """The forms of a guess in which a router chooses experts for tokens."""

    def __init__(self, guess: Guess) -> None:
        self.guess = guess
        self.right_experts = False
        """Whether some weights of the experts produce y, however they are computed."""
        self._known = {"x": guess.call.x} | guess.extra_inputs

    @property
    def fits(self) -> bool:
        """Whether the layer takes tokens of the experts' width and returns one output for each."""
        x, y = self.guess.call.x, self.guess.call.y
        return (
            x.ndim <= 3 and x.shape[-1] == self.guess.reading.dim and y.shape[:-1] == x.shape[:-1]
        )

    def text(self, form: RoutedForm) -> str:
        return self.guess.text(form.lines(), form.activation, form.k)

    def with_limit(self, form: RoutedForm, limit: Bounds) -> Iterator[str]:
        """Yields the text of a form with a clamp at each place where a layer may have one."""
        for where in ("logits", "y", "x", "weights"):
            yield self.text(replace(form, limits=(*form.limits, (where, limit))))

    @torch.no_grad()
    def matching(self) -> Iterator[RoutedForm]:
        """Yields the forms that produce y, the simplest first."""
        guess = self.guess
        x, y = guess.call.x, guess.call.y
        if not self.fits:
            return
        masks = [m for m in ("", *guess.masks) if not m or not y[self._value(m)].any()]
        for norm in ("", *guess.norms):
            h = self._value(f"{norm}(x)") if norm else x
            if h is None:
                continue
            self._known["h"] = h
            added = self._addends("h" if norm else "x")
            for activation in self._activations():
                outputs = self._outputs(h, activation)
                if outputs is None or (*outputs.shape[:-2], outputs.shape[-1]) != y.shape:
                    continue
                for mask in masks:
                    rows = torch.ones(y.shape[:-1], dtype=torch.bool)
                    rows = rows & ~self._value(mask) if mask else rows
                    targets = [(code, (y - part)[rows]) for code, part in added]
                    self.right_experts |= any(
                        weights_that_fit(outputs[rows], target) is not None for _, target in targets
                    )
                    plain = RoutedForm("", "", norm, mask=mask, activation=activation)
                    yield from self._with_weights(plain, outputs[rows], targets, rows)

    def _with_weights(
        self,
        plain: RoutedForm,
        outputs: Tensor,
        targets: Sequence[tuple[str, Tensor]],
        rows: Tensor,
    ) -> Iterator[RoutedForm]:
        """Yields the forms that produce y, for each gate, way to choose, and k."""
        guess = self.guess
        h, largest = "h" if plain.norm else "x", float(guess.call.y.abs().max())
        numbers = guess.numbers()
        for gate in self._gates():
            for form, k in itertools.product(self._forms(), self._ks()):
                if ("{k}" in form) != bool(k):
                    continue
                weights = self._weights(gate.format(x=h), form, k)
                if weights is None or weights.shape[:-1] != rows.shape:
                    continue
                guess.count.add()
                ours = torch.einsum("tn,tno->to", weights[rows], outputs)
                square = float((ours * ours).sum())
                for added, target in targets:
                    ratio = float((target * ours).sum()) / square if square else 1.0
                    ratio = 1.0 if abs(ratio - 1) < 1e-4 else ratio
                    off = float((target - ratio * ours).abs().max()) / largest
                    guess.count.nearest = min(guess.count.nearest, off)
                    if not off <= 1e-4:
                        continue
                    for scale in _codes_of_factor(ratio, numbers):
                        yield replace(plain, gate=gate, form=form, added=added, scale=scale, k=k)

    def _value(self, code: str) -> Any:
        return self.guess.value(code, self._known)

    def _weights(self, gate: str, form: str, k: str) -> Tensor | None:
        """Returns the weights [..., n] of all experts for a way to choose; None if it fails."""
        *steps, last = form.format(logits=gate, k=k).splitlines()
        names = {"layer": self.guess.layer, "torch": torch, "F": nn.functional}
        known: dict[str, Any] = {**names, **self._known}
        try:
            exec("\n".join(steps), known)
            w = eval("w.softmax(dim=-1)" if "w.softmax" in last else "w", known)
        except USER_CODE_ERRORS:
            return None
        if "index" not in last:
            return w if isinstance(w, Tensor) and w.shape[-1] == self.guess.reading.count else None
        index = known["index"]
        dense = w.new_zeros(*w.shape[:-1], self.guess.reading.count)
        return dense.scatter(-1, index, w) if w.shape == index.shape else None

    def _outputs(self, h: Tensor, activation: str) -> Tensor | None:
        """Returns every expert's outputs for the tokens, [..., n, o]."""
        more: dict[str, Any] = {"activation": activation} if activation else {}
        try:
            bank = ExpertsDescription(**self.guess.reading.arguments, **more).build("")
            return torch.stack([bank.expert(i, h) for i in range(bank.spec.experts)], dim=-2)
        except USER_CODE_ERRORS:
            return None

    def _activations(self) -> Sequence[str]:
        return [""] if self.guess.reading.listed else ["silu", "gelu", "relu", "relu2", "gelu-tanh"]

    def _forms(self) -> Iterator[str]:
        yield from FORMS
        n = self.guess.reading.count
        layer = self.guess.layer
        tensors = [*self.guess.other_parameters]
        tensors += [(code_of(layer, name), b) for name, b in layer.named_buffers()]  # type: ignore[misc]
        for bias, tensor in tensors:
            if tuple(tensor.shape) == (n,) and tensor.is_floating_point():
                for form, squash in itertools.product(CORRECTED, ("sigmoid()", "softmax(dim=-1)")):
                    yield form.replace("{bias}", bias).replace("{squash}", squash)

    def _gates(self) -> Iterator[str]:
        """Yields code of router logits, from `{x}` or another input, also scaled by numbers."""
        plain = list(self._plain_gates())
        yield from plain
        numbers = {c: v for c, v in self.guess.numbers().items() if v not in (0.0, 1.0) and v > 0}
        for gate, code in itertools.product(plain, numbers):
            yield f"({gate} / {code})"
            yield f"({gate} * {code})"

    def _plain_gates(self) -> Iterator[str]:
        guess = self.guess
        d, n, x = guess.reading.dim, guess.reading.count, guess.call.x
        inputs = ["{x}", *(f"{norm}(x)" for norm in guess.norms)]
        for name, value in guess.extra_inputs.items():
            if value.shape == (*x.shape[:-1], n):
                yield name
            elif value.shape == x.shape and value.is_floating_point():
                inputs.append(name)
            elif value.shape == (len(x), d):
                inputs.append(f"{name}.unsqueeze(1).expand_as(x)")
        inside: set[int] = set()
        for code, module in guess.modules:
            if self._returns_logits(module, x, n):
                inside |= {id(p) for p in module.parameters()}
                yield from (f"{code}({value})" for value in inputs)
        yield from self._two_layer_gates(inputs)
        for code, given, width in self._matrices(inside):
            if (given, width) == (d, n):
                yield from (code.format(value) for value in inputs)

    def _two_layer_gates(self, inputs: Sequence[str]) -> Iterator[str]:
        """Yields routers of two linear maps of the layer, as code with `{x}` for the input."""
        guess, n, d = self.guess, self.guess.reading.count, self.guess.reading.dim
        maps = [(f"{code}({{}})", given, out) for code, out, given in guess.linears]
        linears = [module for _, module in guess.modules if isinstance(module, nn.Linear)]
        maps += self._matrices({id(p) for module in linears for p in module.parameters()})
        between = [*GATE_ACTIVATIONS, *self._modules_between()]
        for (first, given, width), (second, middle, out) in itertools.permutations(maps, 2):
            if (given, middle, out) == (d, width, n):
                for act, value in itertools.product(between, inputs):
                    yield second.format(act.format(first.format(value)))

    def _matrices(self, inside: Collection[int]) -> Iterator[CodeOfMap]:
        """Yields the maps of matrices outside modules, with each vector that may be a bias.

        `inside` are the ids of the parameters of modules that are themselves maps.
        """
        parameters = [(code, p) for code, p in self.guess.other_parameters if id(p) not in inside]
        vectors = [(code, len(p)) for code, p in parameters if p.ndim == 1]
        for code, p in parameters:
            if p.ndim != 2:
                continue
            rows, columns = p.shape
            for matrix, given, width in ((code, rows, columns), (f"{code}.T", columns, rows)):
                yield f"({{}} @ {matrix})", given, width
                for bias in (name for name, size in vectors if size == width):
                    yield f"({{}} @ {matrix} + {bias})", given, width

    def _modules_between(self) -> Iterator[str]:
        """Yields the layer's own activations and norms, which a function may follow, as code."""
        layer, reading = self.guess.layer, self.guess.reading
        for path, module in layer.named_modules():
            if not path or path.split(".")[0] in reading.uses or [*module.children()]:
                continue
            if isinstance(module, nn.Linear):
                continue
            code = f"{code_of(layer, path)}({{}})"
            yield code
            if [*module.parameters()]:
                yield from (act.format(code) for act in GATE_ACTIVATIONS if act != "{}")

    @staticmethod
    def _returns_logits(module: nn.Module, x: Tensor, n: int) -> bool:
        """Whether a module computes one number per expert from tokens, like a router."""
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or not [*module.parameters()]:
            return False
        try:
            logits = module(x)
        except Exception:  # noqa: BLE001  a module may take any arguments
            return False
        return isinstance(logits, Tensor) and logits.shape == (*x.shape[:-1], n)

    def _ks(self) -> list[str]:
        """Returns the candidates for k, as code; the empty one is for all experts."""
        n, numbers = self.guess.reading.count, self.guess.numbers()
        names = [code for code, value in numbers.items() if value.is_integer() and 0 < value < n]
        return ["", *names, *(str(k) for k in range(1, min(n, 5)) if not names)]

    def _addends(self, h: str) -> list[tuple[str, Tensor]]:
        """Returns terms that may be added to the experts' sum, as code, with their values."""
        guess, zero = self.guess, torch.zeros_like(self.guess.call.y)
        parts = [*self._shared_modules(), *self._shared_maps()]
        gates = [f"{code}({{h}}).sigmoid()" for code, rows, _ in guess.linears if rows == 1]
        out = guess.call.y.shape[-1]
        biases = [code for code, p in guess.other_parameters if tuple(p.shape) == (out,)]
        codes = ["", "x", *parts, *biases]
        codes += [f"{gate} * {part}" for gate, part in itertools.product(gates, parts)]
        codes += [f"x + {code}" for code in codes[2:]]
        codes += [" + ".join(pair) for pair in itertools.combinations(parts, 2)]
        found = []
        for code in codes[:MAX_ADDENDS]:
            value = self._value(code.format(h=h)) if code else zero
            if isinstance(value, Tensor) and value.is_floating_point():
                try:
                    value = value.expand_as(zero)
                except RuntimeError:
                    continue
                found.append((code, value))
        return found

    def _shared_modules(self) -> Iterator[str]:
        """Yields code of modules that may be shared experts, and of lists, with `{h}` as input."""
        inside: set[int] = set()
        for code, module in self.guess.modules:
            if id(module) in inside or is_norm(module) or not [*module.parameters()]:
                continue
            if isinstance(module, nn.ModuleList):
                yield f"sum(f({{h}}) for f in {code})"
            elif isinstance(module, nn.ModuleDict):
                yield f"sum(f({{h}}) for f in {code}.values())"
            else:
                inside |= set(map(id, module.modules()))
                yield f"{code}({{h}})"

    def _shared_maps(self) -> Iterator[str]:
        """Yields code of shared experts made of two or three maps of the layer, with `{h}`."""
        guess, d, out = self.guess, self.guess.reading.dim, self.guess.call.y.shape[-1]
        maps = guess.linears
        ups = [(code, rows) for code, rows, columns in maps if columns == d and rows > 1]
        for (down, rows, columns), act in itertools.product(maps, SHARED_ACTIVATIONS):
            fitting = [code for code, width in ups if width == columns and code != down]
            if rows != out:
                continue
            yield from (f"{down}({act}({up}({{h}})))" for up in fitting)
            for gate, up in itertools.permutations(fitting, 2):
                yield f"{down}({act}({gate}({{h}})) * {up}({{h}}))"


def _codes_of_factor(ratio: float, numbers: dict[str, float]) -> list[str]:
    """Returns the codes of a factor: empty for 1, otherwise the layer's numbers of this value."""
    if ratio == 1.0:
        return [""]
    return [code for code, value in numbers.items() if abs(value - ratio) <= 1e-4 * abs(ratio)]
