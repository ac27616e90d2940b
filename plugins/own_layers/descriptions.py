"""Descriptions of a user's layer, which consist of the layer's tensors and options.

An adapter (`adapters`) returns one of the three descriptions, which `moexport` exports as
`SoftMoE`, `MuMoE` and `Experts`. Each checks shapes, builds the layer of `graphs.layers` that
computes with the tensors, and yields the same layer with other options (`variants`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, UsageError
from ...exporter.families.mumoe import CORE, FACTORS, FULL, read_tensor, tensor_names
from ...graphs.layers.expert import Activation
from ...graphs.layers.mumoe import NORM_EPS, GateActivation, MuMoE, MuMoESpec, MuMoEWeights
from ...graphs.layers.soft_moe import (
    ExpertKind,
    NormKind,
    SlotSource,
    SoftMoE,
    SoftMoESpec,
    SoftMoEWeights,
)
from ..token_routed.layers.experts import Experts, ExpertsSpec, ExpertsWeights, WeightsOn
from ..token_routed.own_forward import Code, Forward, Router
from .expert_forms import (
    ExpertArguments,
    ExpertForm,
    check_choice,
    check_shape,
    entries_of,
    float_tensor,
    float_vector,
    is_map,
    linear_map,
    rms_eps,
)

DEFAULT_EPS: Mapping[NormKind, float] = {"none": 0.0, "l2": 1e-12, "layernorm": 1e-5}
"""The defaults of `F.normalize` and `nn.LayerNorm`; other normalisations have no usual eps, so it
must be given."""

TRIED_EPS: Mapping[NormKind, tuple[float, ...]] = {
    "none": (0.0,),
    "l2": (1e-12,),
    "l2-plus": (1e-6,),
    "l2-rsqrt": (1e-6,),
    "layernorm": (1e-5, 1e-6, 1e-12),
}
"""The usual values of eps by normalisation; no others are tried, for they hardly change tokens."""


def _soft_moe(
    form: ExpertForm,
    spec: Mapping[str, Any],
    phi: Tensor | None,
    activation: Activation,
    **weights: Tensor | None,
) -> SoftMoE:
    """Returns a Soft MoE layer with these experts; `spec` has the other properties."""
    form = form.in_halves()
    kind: ExpertKind = "mlp" if form.gate == "none" else "gated"
    full_spec = SoftMoESpec(
        experts=form.count,
        dim=form.dim,
        hidden=form.hidden,
        out=form.out,
        expert="linear" if form.w2 is None else kind,
        gate_first=kind == "gated",
        activation=form.activation or activation,
        hidden_norm=form.hidden_norm,
        out_norm=form.out_norm,
        out_activation=form.out_activation,
        **spec,
    )
    all_weights = SoftMoEWeights(
        phi=phi, w1=form.w1, b1=form.b1, w2=form.w2, b2=form.b2, norms=form.norms, **weights
    )
    return SoftMoE(full_spec, all_weights).eval()


def _softmax(logits: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Returns the softmax of the logits over some axes."""
    return (logits - logits.logsumexp(axes, keepdim=True)).exp()


D = TypeVar("D", bound=ExpertArguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContents:
    """The contents of a user's layer.

    `numbers` has numeric attributes, and parameters and buffers of one element, by name. `biases`
    has the biases of maps by the memory address of their weights.
    """

    numbers: Mapping[str, float]
    parameters: Mapping[str, Tensor]
    biases: Mapping[int, Tensor]


def numbers_in(module: nn.Module) -> dict[str, float]:
    """Returns the numeric attributes of a module by name."""
    numbers = {name: v for name, v in vars(module).items() if isinstance(v, int | float)}
    return {name: float(v) for name, v in numbers.items() if not isinstance(v, bool)}


def contents_of(layer: nn.Module) -> LayerContents:
    numbers = numbers_in(layer)
    for name, value in (*layer.named_parameters(), *layer.named_buffers()):
        if value.numel() == 1:
            numbers[name] = float(value)
            numbers[f"{name}.exp()"] = float(value.exp())
    biases = {
        part.weight.data_ptr(): part.bias
        for part in layer.modules()
        if is_map(part) and isinstance(part.weight, Tensor) and isinstance(part.bias, Tensor)
    }
    return LayerContents(numbers=numbers, parameters=dict(layer.named_parameters()), biases=biases)


def _expert_variants(
    description: D, default: Activation, own: LayerContents
) -> Iterator[tuple[dict[str, str], D]]:
    """Yields a description with other activations, and with its weights read in other ways."""
    experts = description.with_biases(own.biases)
    if experts is not None:
        yield {"the experts": "with their biases"}, replace(description, experts=experts)
    form = description.form()
    current = form.activation or default
    between = dict.fromkeys([current, *(() if form.w2 is None else get_args(Activation))])
    usual: tuple[Activation, ...] = ("relu", "gelu", "silu", "softmax", "identity")
    after = dict.fromkeys([form.out_activation, *usual])
    for activation, out, alpha, (reading, weights) in product(
        between, after, dict.fromkeys([description.alpha, 1.0]), _reread_weights(form)
    ):
        changed = {} if activation == current else {"activation": repr(activation)}
        if alpha != description.alpha:
            changed["alpha"] = f"{alpha:g}"
        changed |= reading
        if out != form.out_activation:
            changed["out_activation"] = repr(out)
        if len(changed) > 1 and (alpha != description.alpha or out != form.out_activation):
            continue
        read = replace(weights, activation=activation, out_activation=out)
        yield changed, replace(description, read=read, alpha=alpha)


def _reread_weights(form: ExpertForm) -> Iterator[tuple[dict[str, str], ExpertForm]]:
    """Yields the experts unchanged, and then with each other way to read their weights."""
    yield {}, form
    if form.gate != "none":
        yield {"gate and up": "exchanged"}, form.exchanged()
    if form.gate == "concatenated" and form.w1[0].shape[1] == 2 * form.w1[0].shape[0]:
        for name, halves in (("gate", (0,)), ("up", (1,)), ("gate and up", (0, 1))):
            w1 = tuple(_transposed(matrix, halves) for matrix in form.w1)
            yield {f"the weights of {name}": "transposed"}, replace(form, w1=w1)
    for name, bias, matrices in (("first", "b1", form.w1), ("last", "b2", form.w2)):
        if matrices is not None and matrices[0].shape[0] == matrices[0].shape[1]:
            transposed: Any = {f"w{bias[1]}": tuple(matrix.T for matrix in matrices)}
            yield {f"the {name} weight": "transposed"}, replace(form, **transposed)
        if getattr(form, bias) is not None:
            without: Any = {bias: None}
            yield {f"the {name} map": "without its bias"}, replace(form, **without)


def _transposed(matrix: Tensor, halves: tuple[int, ...]) -> Tensor:
    """Returns the columns [d, 2d] of gate and up with these halves transposed."""
    both = enumerate(matrix.chunk(2, dim=1))
    return torch.cat([half.T if i in halves else half for i, half in both], dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftMoEDescription(ExpertArguments):
    """A Soft MoE layer: tokens (b, m, d) to (b, m, o), through n experts with p slots each.

    L = (x̂·phi + bias) / temperature; the slots are averages of tokens by the softmax of L over the
    tokens; y is the sum of the experts' outputs weighted by each token's softmax of L over all
    slots of all experts, plus the layer's input if the layer is `residual`.

    `phi` [d, n, p], or [d, n] for one slot each, is the matrix by which the router multiplies
    tokens, normalised and scaled; `bias` is [n, p] or [n]. See `ExpertArguments` for the experts;
    their default `activation` is `gelu`.

    `norm` is how x becomes x̂: `none`; `l2` x / max(‖x‖, eps); `l2-plus` x / (‖x‖ + eps);
    `l2-rsqrt` x / √(‖x‖² + eps); `layernorm`; or the `nn.LayerNorm` or `nn.RMSNorm` itself. `gain`
    and, for `layernorm`, `shift` [d] follow it. `slots_from` determines which tokens the slots
    average: x̂ (`normalised`) or x (`raw`).

    `forward` is user code around the layer: `forward(moe, …)` takes our layer, then the arguments
    of the user's layer, calls `moe(x)` once and returns what the user's layer returns.

    Raises UsageError, naming the argument and what was expected.
    """

    advice: ClassVar[str] = (
        "phi is the matrix by which the router multiplies, normalised and scaled; dispatch is a "
        "softmax over the tokens, combine one over all slots; for anything else use "
        "moexport.Experts with a forward"
    )

    phi: Tensor
    temperature: float | Tensor = 1.0
    bias: Tensor | None = None
    residual: bool = False
    norm: NormKind | nn.Module = "none"
    eps: float | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None
    slots_from: SlotSource = "normalised"
    forward: Forward | None = None

    @property
    def code(self) -> Code | None:
        return None if self.forward is None else Code(self.forward)

    def build(self, name: str) -> SoftMoE:
        form = self.form()
        phi = float_tensor("phi", self.phi, (2, 3), "[d, n, p], or [d, n] for one slot per expert")
        phi = phi.unsqueeze(2) if phi.ndim == 2 else phi
        d, n, p = phi.shape
        check_choice("slots_from", self.slots_from, SlotSource)
        norm, eps, gain, shift = self._normalisation(d)
        self._check_experts(form, d, n)
        temperature = float(self.temperature)
        if not temperature > 0:
            raise UsageError(f"temperature={temperature:g} is not above 0")
        bias = None
        if self.bias is not None:
            flat = float_tensor("bias", self.bias, None, "[n, p]").reshape(-1)
            check_shape("bias", flat, (n * p,), "[n, p], a number per slot")
            bias = flat.view(n, p) / temperature
        spec = {"name": name, "slots": p, "norm": norm, "norm_eps": eps, "alpha": self.alpha}
        spec |= {"slots_from": self.slots_from, "biased": bias is not None}
        scaled = phi if temperature == 1.0 else phi / temperature
        weights = {"gain": gain, "shift": shift, "bias": bias}
        return _soft_moe(form, spec, scaled, "gelu", **weights)

    def _check_experts(self, form: ExpertForm, d: int, n: int) -> None:
        if form.dim != d:
            what = "experts[0]: its first weight" if self.experts is not None else "w1"
            shape = list(form.w1[0].T.shape if self.experts is not None else form.w1[0].shape)
            raise UsageError(
                f"{what} has the shape {shape}, but phi {list(self.phi.shape)} is for d = {d}",
                hint="check whether phi ([d, n, p]) or a weight is transposed (nn.Linear and "
                "lists have [out, in], w1 and w2 [n, in, out])",
            )
        if form.count != n:
            slots = n // form.count if n % form.count == 0 else 0
            raise UsageError(
                f"experts has {form.count} entries, but phi {list(self.phi.shape)} is for n = {n}",
                hint=f"{slots} slots per expert: phi.unflatten(1, ({form.count}, {slots})) if an "
                "expert's slots are consecutive"
                if slots and self.phi.ndim == 2
                else "experts=[(e.up, e.down) for e in layer.experts]; phi is [d, n, p]",
            )

    def variants(
        self, own: LayerContents
    ) -> Iterator[tuple[dict[str, str], SoftMoEDescription | ExpertsDescription]]:
        """Yields descriptions with other options, and what changed in them.

        These are all combinations of activation, normalisation and source of slots, and each other
        option by itself. `own` is the contents of the user's layer, such as possible temperatures.
        """
        d = self.phi.shape[0]
        current = self._normalisation(d)
        usual = ((kind, eps) for kind, values in TRIED_EPS.items() for eps in values)
        norms = dict.fromkeys([current[:2], *usual])
        forms = list(_expert_variants(self, "gelu", own))
        for (norm, eps), source, (experts, other), rms in product(
            norms, get_args(SlotSource), forms, (False, True)
        ):
            if norm == "none" and source != self.slots_from:
                continue  # no normalisation, so the same tokens
            if rms and not norm.startswith("l2"):
                continue
            changed = {} if norm == current[0] else {"norm": repr(norm)}
            if source != self.slots_from:
                changed["slots_from"] = repr(source)
            changed |= experts
            if eps != (current[1] if norm == current[0] else DEFAULT_EPS.get(norm)):
                changed["eps"] = f"{eps:g}"  # the default is not shown
            if "out_activation" in changed and len(changed) > 1:
                continue
            gain, shift = current[2], current[3] if norm == "layernorm" else None
            if rms:  # an RMSNorm is x̂·√d·γ
                gain = torch.full((d,), d**0.5) * (1 if gain is None else gain)
                changed["gain"] = "d**0.5" if current[2] is None else "d**0.5 * gain"
            options = {"norm": norm, "eps": eps, "gain": gain, "shift": shift}
            yield changed, replace(other, **options, slots_from=source)
        yield from self._rescaled(own)
        yield from self._other_axes()

    def _rescaled(self, own: LayerContents) -> Iterator[tuple[dict[str, str], SoftMoEDescription]]:
        """Yields other temperatures, phi without its bias, and other orders of phi's columns."""
        d, phi = self.phi.shape[0], self.phi
        numbers = own.numbers
        factors = {"d**0.5": d**0.5, "d**-0.5": d**-0.5}
        factors |= {f"layer.{name}": value for name, value in numbers.items() if value > 0}
        factors |= {f"1 / layer.{name}": 1 / value for name, value in numbers.items() if value > 0}
        for name, factor in factors.items():
            if factor != 1.0:
                temperature = float(self.temperature) * factor
                yield {"temperature": name}, replace(self, temperature=temperature)
        if self.bias is not None:
            yield {"bias": "None"}, replace(self, bias=None)
        else:
            for name, parameter in own.parameters.items():
                if parameter.numel() == phi[0].numel() and parameter.data_ptr() != phi.data_ptr():
                    yield {"bias": f"layer.{name}"}, replace(self, bias=parameter)
        normed = phi / phi.norm(dim=0, keepdim=True).clamp_min(1e-12)
        yield {"phi": "F.normalize(phi, dim=0)"}, replace(self, phi=normed)
        if phi.ndim == 3 and phi.shape[2] > 1:
            n, p = phi.shape[1:]
            other = phi.reshape(-1, p, n).mT
            yield {"phi": f"phi.flatten(1).unflatten(1, ({p}, {n})).mT"}, replace(self, phi=other)
            other = phi.mT.reshape(phi.shape)
            yield {"phi": f"phi.mT.flatten(1).unflatten(1, ({n}, {p}))"}, replace(self, phi=other)

    def _other_axes(self) -> Iterator[tuple[dict[str, str], ExpertsDescription]]:
        """Yields the layer with its softmaxes over other axes, which a forward could compute."""
        form = self.form()
        read = replace(form, activation=form.activation or "gelu")
        layer = self.build("")
        axes = {"all slots": (2, 3), "the experts": (2,), "an expert's slots": (3,)}
        axes |= {"the tokens": (1,)}
        for (d_name, dispatch), (c_name, combine) in product(axes.items(), axes.items()):
            if (d_name, c_name) == ("the tokens", "all slots"):
                continue  # the Soft MoE itself

            def forward(
                experts: Any,
                x: Tensor,
                dispatch: tuple[int, ...] = dispatch,
                combine: tuple[int, ...] = combine,
            ) -> Any:
                logits = layer.route(x).logits
                source = layer.normalise(x) if self.slots_from == "normalised" else x
                slots = torch.einsum("bmd,bmnp->bnpd", source, _softmax(logits, dispatch))
                return experts(slots, combine=_softmax(logits, combine))

            changed = {"the softmax of dispatch": f"over {d_name}", "of combine": f"over {c_name}"}
            yield changed, ExpertsDescription(read=read, alpha=self.alpha, forward=forward)

    def _normalisation(self, d: int) -> tuple[NormKind, float, Tensor | None, Tensor | None]:
        """Returns how x becomes x̂: the kind, its eps, gain and shift."""
        norm, eps, gain, shift = self.norm, self.eps, self.gain, self.shift
        if isinstance(norm, nn.Module):
            if eps is not None or gain is not None or shift is not None:
                raise UsageError(
                    f"eps, gain and shift are already in the {type(norm).__name__} given as norm",
                    hint="leave them out",
                )
            norm, eps, gain, shift = _from_module(norm, d)
        check_choice("norm", norm, NormKind)
        if eps is None:
            if norm not in DEFAULT_EPS:
                raise UsageError(f"norm={norm!r} needs an eps", hint="for example eps=1e-6")
            eps = DEFAULT_EPS[norm]
        if shift is not None and norm != "layernorm":
            raise UsageError(f"shift needs norm='layernorm', but norm is {norm!r}")
        return norm, eps, float_vector("gain", gain, (d,)), float_vector("shift", shift, (d,))


Statistics = tuple[Tensor, Tensor]
"""Recorded mean and variance [n] of a level's logits."""

Factors = Sequence[Tensor] | nn.ParameterList

TensorForm = Tensor | Factors | tuple[Tensor, Factors]
"""A weight tensor: the whole [n_1, …, d, o], CP factors, TR cores, or Tucker's (core, factors)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MuMoEDescription:
    """A muMoE layer: y = W(a_1, …, a_E, x) for each token, a_e = activation(norm(x·gate_e)).

    `gates` has a matrix [d, n_e] or an `nn.Linear` for each level. `weights` is the whole
    tensor [n_1, …, d, o]; its CP factors [n_1, R], …, [d, R], [o, R] or TR cores [r1, n_1, r2], …,
    [r, d, r'], [r', o, r1] as a list; or for Tucker (core, factors). If the input mode has d + 1
    rows, the last is the bias. `second` is a second tensor in the same form, after a GELU.

    `norm` comes before the `activation` (`entmax15`, `sparsemax` or `softmax`): `none`; `ln`, a
    layer normalisation over the experts without gain and shift, eps 1e-5; or a list with each
    level's `nn.BatchNorm1d`, or its recorded (mean, variance) for eps 1e-5. `input_norm` is an
    `nn.LayerNorm` of the tensors' input; the gate's input is x itself.

    `forward` is user code around the layer: `forward(mumoe, …)` takes our layer, then the arguments
    of the user's layer, calls `mumoe(x)` once and returns the result of that layer. Without
    `gates`, it calls `mumoe(x, a_1, …)` with each level's coefficients [b, m, n].

    Raises UsageError, naming the argument and what was expected.
    """

    advice: ClassVar[str] = (
        "each level's coefficients are activation(norm(x·gate)), and the tensor is multiplied by x "
        "and all coefficients"
    )

    gates: Sequence[nn.Linear | Tensor] | nn.ModuleList | nn.ParameterList | None = None
    weights: TensorForm
    second: TensorForm | None = None
    norm: Literal["none", "ln"] | Sequence[nn.Module | Statistics] | nn.ModuleList = "none"
    activation: GateActivation = "entmax15"
    input_norm: nn.LayerNorm | None = None
    forward: Forward | None = None

    @property
    def code(self) -> Code | None:
        return None if self.forward is None else Code(self.forward)

    def build(self, name: str) -> MuMoE:
        check_choice("activation", self.activation, GateActivation)
        projections, means = list[Tensor](), list[Tensor]()
        if self.gates is None:
            d, levels = self._sizes()
        else:
            projections, biases = self._gates()
            d, levels = projections[0].shape[0], tuple(p.shape[1] for p in projections)
            if self.norm != "ln":
                projections, means = self._folded(projections, biases)
            elif any(bias.any() for bias in biases):
                raise UsageError(
                    "norm='ln' normalises x·gate, but the gate also has a bias",
                    hint="such a layer cannot be exported",
                )
        specs, tensors, width = [], [], d
        for what, form in (("weights", self.weights), ("second", self.second)):
            if form is None:
                continue
            named = _named_parts(what, form)
            try:
                specs.append(read_tensor("moexport.MuMoE", what, named, levels, width))
            except CheckpointError as error:
                raise UsageError(
                    error.message.replace("projs.*", "gates"), hint=error.hint
                ) from error
            tensors.append(tuple(named[key] for key in tensor_names(specs[-1])))
            width = specs[-1].out
        if len({spec.form for spec in specs}) > 1:
            raise UsageError(
                f"weights has the form {specs[0].form}, but second has the form {specs[1].form}",
                hint="both tensors of a layer must have the same form",
            )
        gain = shift = None
        if self.input_norm is not None:
            gain, shift = _input_norm(self.input_norm, d)
        spec = MuMoESpec(
            name=name,
            tensors=tuple(specs),
            norm="ln" if self.norm == "ln" else "bn",
            activation=self.activation,
            input_norm=gain is not None,
            external_routing=self.gates is None,
        )
        # The norm is folded into the gate, so these variances divide by 1.
        variances = tuple(torch.full_like(mean, 1 - NORM_EPS) for mean in means)
        weights = MuMoEWeights(
            projections=tuple(projections),
            tensors=tuple(tensors),
            means=tuple(means),
            variances=variances,
            gain=gain,
            shift=shift,
        )
        return MuMoE(spec, weights).eval()

    def variants(self, own: LayerContents) -> Iterator[tuple[dict[str, str], MuMoEDescription]]:
        """Yields descriptions with each norm and activation, and what changed in them."""
        del own
        if self.gates is None:
            yield {}, self
            return
        biased = any(bias.any() for bias in self._gates()[1])
        others = ("none",) if biased else ("none", "ln")
        norms: list[Any] = [self.norm, *(norm for norm in others if norm != self.norm)]
        for norm, activation in product(norms, get_args(GateActivation)):
            changed = {} if norm is self.norm else {"norm": repr(norm)}
            if activation != self.activation:
                changed["activation"] = repr(activation)
            yield changed, replace(self, norm=norm, activation=activation)

    def _sizes(self) -> tuple[int, tuple[int, ...]]:
        """Returns the width of a token and the number of experts per level, from the weights."""
        if self.forward is None:
            raise UsageError(
                "neither gates nor a forward that computes the coefficients is given",
                hint="gates=[layer.gate], or forward=lambda mumoe, x: mumoe(x, coefficients)",
            )
        named = _named_parts("weights", self.weights)
        if FULL in named:
            *levels, d, _ = named[FULL].shape
            return d, tuple(levels)
        factors = [factor for key, factor in named.items() if key != CORE]
        axis = 1 if all(factor.ndim == 3 for factor in factors) else 0
        *sizes, d, _ = (factor.shape[axis] for factor in factors)
        return d, tuple(sizes)

    def _gates(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns each level's projection [d, n] and bias [n]."""
        projections, biases = [], []
        gates = entries_of(self.gates)
        if not gates:
            raise UsageError(
                "gates is not a list with a gate for each level", hint="gates=[layer.gate]"
            )
        for level, gate in enumerate(gates):
            what, bias = f"gates[{level}]", None
            if isinstance(gate, nn.Module):
                weight, bias = linear_map(what, gate)
                projection = weight.T
            else:
                projection = float_tensor(what, gate, (2,), "[d, n]")
            projections.append(projection)
            n = projection.shape[1]
            check_shape(what, projection, (projections[0].shape[0], n), "[d, n], d inputs")
            biases.append(projection.new_zeros(n) if bias is None else bias)
        return projections, biases

    def _folded(
        self, projections: list[Tensor], biases: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the projections with the norm folded in, and what to subtract afterwards."""
        if self.norm == "none":
            return projections, [-bias for bias in biases]
        norms = entries_of(self.norm)
        if len(norms) != len(projections):
            raise UsageError(
                f"norm={self.norm!r} is neither 'none' nor 'ln' nor a list with the batch "
                f"normalisation of each of the {len(projections)} levels",
                hint="norm=[layer.bn], or norm=[(mean, variance)]",
            )
        scaled, means = [], []
        for level, (norm, gate, bias) in enumerate(zip(norms, projections, biases, strict=True)):
            scale, shift = _batch_norm(f"norm[{level}]", norm, gate.shape[1])
            scaled.append((gate.double() * scale).float())
            means.append(-(bias.double() * scale + shift).float())
        return scaled, means


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsDescription(ExpertArguments):
    """A bank of experts, and user code around it, which is traced unchanged.

    `forward(experts, …)` takes the bank, then the arguments of the user's layer, and returns the
    layer's result. It calls the bank once:

    - `experts(x, index, weights)`: each token of x [..., d] through the experts index [..., k],
      integers from 0 to n - 1; returns Σ_k weights[..., k] · expert(x), [..., o]
    - `experts(x, weights=w)`: with a weight w [..., n] for every expert; the k largest are used
    - `experts(slots, combine=C)`: each expert on its own slots [b, n, p, d]; returns Σ C · outputs,
      [b, m, o], for combine weights C [b, m, n, p]; Algorithm 1 chooses the k experts with the
      largest sums over the tokens and slots of C

    If the function has a parameter `k`, the number of experts can be changed.

    `router` is short for a forward that returns `experts(x, index, weights)`: a function that takes
    the arguments of the user's layer and returns index and weights. Without either, the adapted
    module itself takes index and weights as arguments.

    See `ExpertArguments` for the experts; their default `activation` is `silu`. With a gate,
    `limit` bounds the gate from above and keeps up within -limit … limit, and `up_offset` is added
    to up. `weights_on`: the weights multiply an expert's `output` or its `input`.

    Raises UsageError, naming the argument and what was expected.
    """

    advice: ClassVar[str] = (
        "forward is what the layer computes, with experts(…) in place of its experts; index has "
        "the numbers of each token's experts, and weights their factors"
    )

    forward: Forward | None = None
    router: Router | None = None
    limit: float | None = None
    up_offset: float = 0.0
    weights_on: WeightsOn = "output"

    @property
    def code(self) -> Code:
        return Code(self.forward, self.router)

    def build(self, name: str, k: int = 1) -> Experts:
        """Returns the experts alone; k of them are chosen for each token."""
        form = self.form()
        check_choice("weights_on", self.weights_on, WeightsOn)
        self._check_code()
        if form.gate == "none" and (self.limit is not None or self.up_offset):
            raise UsageError("limit and up_offset need a gate", hint="leave them out")
        spec = ExpertsSpec(
            name=name,
            experts=form.count,
            k=k,
            dim=form.dim,
            hidden=form.hidden,
            out=form.out,
            activation=form.activation or "silu",
            gate=form.gate,
            alpha=self.alpha,
            limit=self.limit,
            up_offset=self.up_offset,
            weights_on=self.weights_on,
            hidden_norm=form.hidden_norm,
            out_norm=form.out_norm,
            out_activation=form.out_activation,
        )
        weights = ExpertsWeights(form.w1, form.w2, form.b1, form.b2, norms=form.norms)
        return Experts(spec, weights).eval()

    def build_for_slots(self, name: str, slots: int) -> SoftMoE:
        """Returns the experts alone, each with `slots` slots."""
        self._check_code()
        if self.limit is not None or self.up_offset or self.weights_on != "output":
            raise UsageError(
                "limit, up_offset and weights_on need experts(x, index, weights), but forward "
                "calls experts(slots, combine=…)",
                hint="leave them out",
            )
        spec = {"name": name, "slots": slots, "alpha": self.alpha, "external_routing": True}
        return _soft_moe(self.form(), spec, None, "silu")

    def _check_code(self) -> None:
        hints = (
            ("router", "router=layer.route, which returns index [..., k] and weights [..., k]"),
            ("forward", "forward=lambda experts, x: experts(x, weights=layer.gate(x))"),
        )
        for what, hint in hints:
            code = getattr(self, what)
            if code is not None and not callable(code):
                raise UsageError(f"{what} is a {type(code).__name__}, not a function", hint=hint)
        if self.router is not None and self.forward is not None:
            raise UsageError("router and forward are both given", hint="give only one")

    def variants(self, own: LayerContents) -> Iterator[tuple[dict[str, str], ExpertsDescription]]:
        """Yields descriptions with other options, and what changed in them."""
        forms = _expert_variants(self, "silu", own)
        for (changed, other), weights_on in product(forms, get_args(WeightsOn)):
            more = {} if weights_on == self.weights_on else {"weights_on": repr(weights_on)}
            yield changed | more, replace(other, weights_on=weights_on)


def _from_module(norm: nn.Module, d: int) -> tuple[NormKind, float, Tensor | None, Tensor | None]:
    """Returns a normalisation layer's kind, eps, gain and shift, as in `SoftMoESpec`."""
    gain, shape = getattr(norm, "weight", None), getattr(norm, "normalized_shape", None)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm) and tuple(shape or ()) != (d,):
        raise UsageError(f"norm is for width {list(shape or ())}, but phi for tokens of width {d}")
    if isinstance(norm, nn.LayerNorm):
        return "layernorm", norm.eps, gain, norm.bias
    if isinstance(norm, nn.RMSNorm):
        # x / √(Σx²/d + eps)·γ = x / √(Σx² + d·eps)·√d·γ
        gain = torch.ones(d) if gain is None else gain
        return "l2-rsqrt", d * rms_eps(norm), gain * d**0.5, None
    raise UsageError(
        f"norm is a {type(norm).__name__}", hint="give nn.LayerNorm, nn.RMSNorm, norm='l2', …"
    )


def _input_norm(norm: nn.LayerNorm, d: int) -> tuple[Tensor, Tensor]:
    """Returns the gain and shift [d] of an input normalisation, whose eps must be `NORM_EPS`."""
    if not isinstance(norm, nn.LayerNorm) or norm.normalized_shape != (d,) or norm.eps != NORM_EPS:
        raise UsageError(
            f"input_norm={norm} is not supported",
            hint=f"nn.LayerNorm({d}, eps={NORM_EPS:g}) is supported",
        )
    gain = float_vector("input_norm", norm.weight, (d,))
    shift = float_vector("input_norm", norm.bias, (d,))
    return torch.ones(d) if gain is None else gain, torch.zeros(d) if shift is None else shift


def _batch_norm(what: str, norm: object, n: int) -> tuple[Tensor, Tensor]:
    """Returns the scale and shift [n], in float64, of a batch normalisation in eval mode."""
    moments: tuple[object, object] = (None, None)
    gain, bias, eps = torch.ones(n), torch.zeros(n), NORM_EPS
    if isinstance(norm, nn.BatchNorm1d):
        moments, eps = (norm.running_mean, norm.running_var), norm.eps
        gain = gain if norm.weight is None else norm.weight.detach()
        bias = bias if norm.bias is None else norm.bias.detach()
    elif isinstance(norm, tuple) and len(norm) == 2:
        moments = norm
    mean, variance = moments
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        raise UsageError(
            f"{what} is a {type(norm).__name__} without statistics",
            hint="give the nn.BatchNorm1d of the level, or its (mean, variance)",
        )
    for name, value in (("mean", mean), ("variance", variance)):
        check_shape(f"{what}: its {name}", value, (n,), "[n], a number per expert")
    scale = gain.double() / torch.sqrt(variance.double() + eps)
    return scale, bias.double() - mean.double() * scale


def _named_parts(what: str, form: TensorForm) -> dict[str, Tensor]:
    """Returns the parts of a weight tensor by their published names."""
    if isinstance(form, Tensor):
        return {FULL: float_tensor(what, form, None, "[n, …, d, o]")}
    parts = entries_of(form)
    named: dict[str, Any] = {}
    if len(parts) == 2 and not isinstance(parts[1], Tensor):
        named[CORE], parts = parts[0], entries_of(parts[1])
    named |= {f"{FACTORS}.{i}": part for i, part in enumerate(parts)}
    if not parts or not all(isinstance(value, Tensor) for value in named.values()):
        raise UsageError(
            f"{what} is a {type(form).__name__}, not a weight tensor",
            hint="the whole tensor, a list of its factors or cores, or (core, factors) for Tucker",
        )
    return {key: float_tensor(f"{what}.{key}", value, None, "") for key, value in named.items()}


Description = SoftMoEDescription | MuMoEDescription | ExpertsDescription
