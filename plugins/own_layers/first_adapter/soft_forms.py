"""Candidates for adapters of Soft MoE layers, as text: by their options, or as a forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..descriptions import Description, SoftMoEDescription, contents_of
from ..mismatch import CLOSE
from .coverage import Bounds
from .forms import USER_CODE_ERRORS, Guess, call_text, clamped, distance

MAX_WIDTH = 1 << 16


@dataclass(frozen=True, slots=True)
class Phi:
    """A matrix that may multiply the tokens, [d, n, p], as code, and its bias."""

    code: str
    bias: str = ""


@dataclass(frozen=True, slots=True)
class SoftForm:
    """One way to compute a Soft MoE layer: the text of its adapter, and what a forward needs."""

    text: str
    phi: Phi
    norm: str
    options: tuple[tuple[str, str], ...] = ()
    residual: bool = False


DISPATCH = "the softmax of dispatch"

RESULTS = (
    "y",
    "x + y",
    "y.masked_fill({mask}[..., None], 0)",
    "x + y.masked_fill({mask}[..., None], 0)",
    "(x + y).masked_fill({mask}[..., None], 0)",
)
"""What a forward may return if a mask selects tokens."""

AXES = {
    "all slots": "logits.flatten(2).softmax(dim=-1).view_as(logits)",
    "the experts": "logits.softmax(dim=2)",
    "an expert's slots": "logits.softmax(dim=3)",
    "the tokens": "logits.softmax(dim=1)",
}
"""Code of the softmax of L [b, m, n, p], by the axes it is over."""


class SoftForms:
    """The forms of a guess in which every expert processes its own slots."""

    def __init__(self, guess: Guess) -> None:
        self.guess = guess

    def matching(self) -> Iterator[SoftForm]:
        """Yields the forms that produce y, those with the fewest options first."""
        guess = self.guess
        if guess.call.extra_args:
            for form in self._masked():
                if self._counted_error(form.text) <= CLOSE:
                    yield form
            return
        contents, found = contents_of(guess.layer), {}
        for phi, norm in itertools.product(self.phis(), ["", *guess.norms]):
            options = [f"phi={phi.code}", *([f"bias={phi.bias}"] if phi.bias else [])]
            options += [guess.reading.keywords, *([f"norm={norm}"] if norm else [])]
            description = guess.describe(call_text("moexport.SoftMoE", options))
            if isinstance(description, SoftMoEDescription):
                try:
                    found[phi, norm] = options, [*description.variants(contents)]
                except USER_CODE_ERRORS:
                    continue
        for simple in (True, False):
            for (phi, norm), (options, variants) in found.items():
                for changed, variant in variants:
                    if simple == (len(changed) < 2):
                        yield from self._variant_form(phi, norm, options, changed, variant)

    def with_limit(self, form: SoftForm, limit: Bounds) -> Iterator[str]:
        """Yields the text of a form as a forward with a clamp where a layer may have one."""
        options = dict(form.options)
        if set(options) - {"norm", "temperature", "slots_from", "eps"}:
            return
        norm = {"'l2'": "F.normalize(x, dim=-1)", "'layernorm'": "F.layer_norm(x, x.shape[-1:])"}
        normed = norm.get(options.get("norm", ""), f"{form.norm}(x)" if form.norm else "x")
        raw = options.get("slots_from") == "'raw'"
        h, source = ("x", "x") if normed == "x" else ("h", "x" if raw else "h")
        logits = f'torch.einsum("bmd,dnp->bmnp", {h}, phi)'
        logits += f" + {form.phi.bias}.view(phi.shape[1:])" if form.phi.bias else ""
        if "temperature" in options:
            logits = f"({logits}) / {options['temperature']}"
        for where in ("logits", "y", "x"):
            lines = [f"x = {clamped('x', limit)}"] if where == "x" else []
            lines += [f"h = {normed}"] if normed != "x" else []
            lines += [f"phi = {self._with_slots(form.phi.code)}", f"logits = {logits}"]
            if where == "logits":
                lines.append(f"logits = {clamped('logits', limit)}")
            y = "x + y" if form.residual else "y"
            y = clamped(f"({y})", limit) if where == "y" else y
            yield self._forward(lines, source, y)

    def _forward(
        self,
        lines: list[str],
        source: str,
        y: str,
        dispatch: str = AXES["the tokens"],
        combine: str = AXES["all slots"],
    ) -> str:
        """Returns the text of a forward: these lines, slots that average `source`, and `y`."""
        slots = f'slots = torch.einsum("bmd,bmnp->bnpd", {source}, {dispatch})'
        result = f"y = experts(slots, combine={combine})"
        # GELU is the default activation of a Soft MoE's experts.
        return self.guess.text([*lines, slots, result, f"return {y}"], "gelu")

    def _with_slots(self, phi: str) -> str:
        """Returns code of phi as [d, n, p]."""
        value = self.guess.value(phi, {})
        return f"{phi}.unsqueeze(2)" if value is not None and value.ndim == 2 else phi

    def _counted_error(self, text: str) -> float:
        """Counts a text and returns its error."""
        off = self.guess.error_of(text)
        self.guess.count.add(off)
        return off

    def _variant_form(
        self,
        phi: Phi,
        norm: str,
        options: list[str],
        changed: Mapping[str, str],
        variant: Description,
    ) -> Iterator[SoftForm]:
        """Yields the form of a description with changed options, if it matches."""
        guess = self.guess
        ours, x, y = guess.result(variant, guess.call), guess.call.x, guess.call.y
        added = None if ours is None or x.shape != ours.shape else x + ours
        residual = distance(y, added) <= CLOSE
        off = distance(y, ours)
        guess.count.add(off)
        if not residual and off > CLOSE:
            return
        if DISPATCH in changed:
            if not residual and not phi.bias:
                text = self._with_axes(changed, phi.code, norm)
                if self._counted_error(text) <= CLOSE:
                    yield SoftForm(text, phi, norm, (("axes", "others"),))
            return
        named = {k: v.replace("phi", phi.code) if k == "phi" else v for k, v in changed.items()}
        if any(" " in key for key in named):
            return
        unchanged = [option for option in options if option.split("=", 1)[0] not in changed]
        new = [f"{key}={value}" for key, value in named.items()]
        text = call_text(
            "moexport.SoftMoE", [*unchanged, *new, *(["residual=True"] if residual else [])]
        )
        if self._counted_error(text) <= CLOSE:
            yield SoftForm(text, phi, norm, tuple(named.items()), residual)

    def _masked(self) -> Iterator[SoftForm]:
        """Yields forms whose second input is a mask of tokens."""
        guess = self.guess
        for phi, norm, mask, result in itertools.product(
            self.phis(), ["", *guess.norms], guess.masks, RESULTS
        ):
            if phi.bias:
                continue
            hidden = f'logits.masked_fill({mask}[:, :, None, None], float("-inf"))'
            lines = [f"h = {norm}(x)"] if norm else []
            h = "h" if norm else "x"
            lines += [
                f'logits = torch.einsum("bmd,dnp->bmnp", {h}, {self._with_slots(phi.code)})',
                f"dispatch = {hidden}.softmax(dim=1)",
            ]
            text = self._forward(lines, h, result.format(mask=mask), "dispatch")
            yield SoftForm(text, phi, norm, (("mask", mask),))

    def _with_axes(self, changed: Mapping[str, str], phi: str, norm: str) -> str:
        """Returns the text of a layer with its softmaxes over other axes."""
        dispatch, combine = (AXES[changed[key].removeprefix("over ")] for key in changed)
        lines = [f"x = {norm}(x)"] if norm else []
        lines.append(f'logits = torch.einsum("bmd,dnp->bmnp", x, {self._with_slots(phi)})')
        return self._forward(lines, "x", "y", dispatch, combine)

    def phis(self) -> Iterator[Phi]:
        """Yields the matrices that may multiply the tokens, and those with a bias."""
        guess = self.guess
        d, n = guess.reading.dim, guess.reading.count
        raw: list[str] = []
        for code, p in guess.other_parameters:
            raw += [f"{code}{suffix}" for suffix in _reshapes(tuple(p.shape), d, n)]
        for name in vars(type(guess.layer)):
            method = getattr(guess.layer, name, None)
            if name.startswith("_") or name == "forward" or not callable(method):
                continue
            try:
                matrix = method()
            except Exception:  # noqa: BLE001  a method may need arguments
                continue
            if isinstance(matrix, Tensor):
                raw += [f"layer.{name}(){end}" for end in _reshapes(tuple(matrix.shape), d, n)]
        yield from map(Phi, raw)
        scalars = [code for code, p in guess.other_parameters if p.numel() == 1]
        biases = {
            f"{code}.weight": f"{code}.bias"
            for code, module in (("layer", guess.layer), *guess.modules)
            if isinstance(getattr(module, "bias", None), Tensor)
        }
        for phi in raw:
            yield from (Phi(f"{code} * F.normalize({phi}, dim=0)") for code in scalars)
            yield from (Phi(phi, b) for w, b in biases.items() if phi.startswith(w))


def _reshapes(shape: tuple[int, ...], d: int, n: int) -> list[str]:
    """Returns the code of each way to turn a tensor of this shape into [d, n, p]."""
    if len(shape) == 3:
        orders = [
            order
            for order in itertools.permutations(range(3))
            if (shape[order[0]], shape[order[1]]) == (d, n)
        ]
        return ["" if order == (0, 1, 2) else f".permute{order}" for order in orders]
    if len(shape) != 2:
        return []
    suffixes = []
    for rows, columns, suffix in ((*shape, ""), (*shape[::-1], ".T")):
        if rows == d and columns % n == 0 and columns < MAX_WIDTH:
            p = columns // n
            suffixes.append(suffix if p == 1 else f"{suffix}.unflatten(1, ({n}, {p}))")
    return suffixes
