"""What a user's own layer is, in the user's words: the user's tensors, as they are, and options.

An adapter (`adapters`) returns one of the three descriptions, which `moexport` gives under the
names `SoftMoE`, `MuMoE` and `Experts`. Each checks shapes, builds the layer of `graphs.layers` that
computes with the tensors, and yields the few options that could be meant otherwise (`variants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, UsageError
from ...graphs.layers.experts import (
    ExpertActivation,
    Experts,
    ExpertsSpec,
    ExpertsWeights,
    Gate,
    WeightsOn,
)
from ...graphs.layers.mumoe import NORM_EPS, GateActivation, MuMoE, MuMoESpec, MuMoEWeights
from ...graphs.layers.soft_moe import (
    Activation,
    ExpertKind,
    Matrices,
    NormKind,
    SlotSource,
    SoftMoE,
    SoftMoESpec,
    SoftMoEWeights,
)
from ..families.mumoe import CORE, FACTORS, WHOLE, read_tensor, tensor_names
from ..token_routed.own_router import Router

LinearMap = nn.Module | Tensor | tuple[Tensor, Tensor | None]
"""A linear map: an `nn.Linear` (or a 1×1 convolution), a weight [out, in], or weight and bias."""

Expert = LinearMap | Sequence[LinearMap]
"""`(first, second)`; `(value, gate, second)` for GEGLU; one map alone for a linear expert."""

DEFAULT_EPS: Mapping[NormKind, float] = {"none": 0.0, "l2": 1e-12, "layernorm": 1e-5}
"""Those of `F.normalize` and `nn.LayerNorm`; the others have no usual one, and it must be said."""

TRIED: Mapping[NormKind, tuple[float, ...]] = {
    "none": (0.0,),
    "l2": (1e-12,),
    "l2-plus": (1e-6,),
    "l2-rsqrt": (1e-6,),
    "layernorm": (1e-5, 1e-6, 1e-12),
}
"""Each normalisation with the eps that are usual: real tokens are too long to tell others apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftMoEDescription:
    """A Soft MoE layer: tokens (b, m, d) to (b, m, o), through n experts with p slots each.

    L = x̂·phi; the slots are averages of tokens by the softmax of L over the tokens; y adds up the
    experts' outputs by each token's softmax of L over all slots of all experts.

    `phi` is [d, n, p], or [d, n] for one slot each: as the router multiplies with it, normalised
    and scaled. `experts` are n `(first, second)` pairs of `nn.Linear` or weights [out, in];
    `(value, gate, second)` is value(x)·gelu(gate(x)) between two maps, and a map alone a linear
    expert. Instead of `experts` the stacked `w1` [n, d, h], `b1` [n, h], `w2` [n, h, o] and `b2`
    [n, o], inputs first, with `expert` `mlp`, `geglu` (`w1` [n, d, 2h], value before gate) or
    `linear` (no `w2`).

    `activation` stands between an mlp's two maps: `gelu`, `gelu-tanh` or `relu`.
    `norm` says what x̂ is: `none`; `l2` x / max(‖x‖, eps); `l2-plus` x / (‖x‖ + eps); `l2-rsqrt`
    x / √(‖x‖² + eps); `layernorm`; or the `nn.LayerNorm` or `nn.RMSNorm` itself. `gain` and, for
    `layernorm`, `shift` [d] follow it. `slots_from` says which tokens the slots average: x̂
    (`normalised`) or x (`raw`).

    Raises UsageError, naming the argument and what was expected.
    """

    advice: ClassVar[str] = (
        "phi is what the router multiplies with, normalised and scaled; slots average by a softmax "
        "over the tokens, the output adds the experts' by one over all slots"
    )

    phi: Tensor
    experts: Sequence[Expert] | nn.ModuleList | None = None
    w1: Tensor | None = None
    b1: Tensor | None = None
    w2: Tensor | None = None
    b2: Tensor | None = None
    expert: ExpertKind | None = None
    activation: Activation = "gelu"
    norm: NormKind | nn.Module = "none"
    eps: float | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None
    slots_from: SlotSource = "normalised"

    def build(self, name: str) -> SoftMoE:
        """Returns the layer that computes this."""
        phi = _tensor("phi", self.phi, (2, 3), "[d, n, p], or [d, n] for one slot per expert")
        phi = phi.unsqueeze(2) if phi.ndim == 2 else phi
        d, n, p = phi.shape
        _choice("activation", self.activation, Activation)
        _choice("slots_from", self.slots_from, SlotSource)
        norm, eps, gain, shift = self._normalisation(d)
        kind, w1, b1, w2, b2 = self._stacked(d, n) if self.experts is None else self._listed(d, n)
        hidden, out = (0, w1[0].shape[1]) if w2 is None else w2[0].shape
        spec = SoftMoESpec(
            name=name,
            experts=n,
            slots=p,
            dim=d,
            hidden=hidden,
            out=out,
            expert=kind,
            activation=self.activation,
            norm=norm,
            norm_eps=eps,
            slots_from=self.slots_from,
        )
        return SoftMoE(spec, SoftMoEWeights(phi, w1, b1, w2, b2, gain, shift)).eval()

    def variants(self) -> Iterator[tuple[dict[str, str], SoftMoEDescription]]:
        """Yields the same weights with every combination of the few options, and what changed."""
        spec = self.build("").spec
        said = self._normalisation(spec.dim)
        norms = dict.fromkeys([said[:2], *((kind, eps) for kind in TRIED for eps in TRIED[kind])])
        activations = get_args(Activation) if spec.expert == "mlp" else (spec.activation,)
        for (norm, eps), source, activation, root in product(
            norms, get_args(SlotSource), activations, (False, True)
        ):
            if norm == "none" and source != self.slots_from:
                continue  # the same tokens
            if root and not norm.startswith("l2"):
                continue
            options = {"norm": norm, "slots_from": source, "activation": activation}
            before = {"norm": said[0], "slots_from": self.slots_from, "activation": self.activation}
            changed = {key: repr(new) for key, new in options.items() if new != before[key]}
            if eps != (said[1] if norm == said[0] else DEFAULT_EPS.get(norm)):
                changed["eps"] = f"{eps:g}"  # the usual one need not be said
            gain, shift = said[2], said[3] if norm == "layernorm" else None
            if root:  # an RMSNorm is x̂·√d·γ
                gain = torch.full((spec.dim,), spec.dim**0.5) * (1 if gain is None else gain)
                changed["gain"] = "d**0.5" if said[2] is None else "d**0.5 * gain"
            yield changed, replace(self, **options, eps=eps, gain=gain, shift=shift)

    def _normalisation(self, d: int) -> tuple[NormKind, float, Tensor | None, Tensor | None]:
        """How x becomes x̂: the kind, its eps, gain and shift."""
        norm, eps, gain, shift = self.norm, self.eps, self.gain, self.shift
        if isinstance(norm, nn.Module):
            if eps is not None or gain is not None or shift is not None:
                raise UsageError(
                    f"eps, gain and shift are those of the {type(norm).__name__} given as norm",
                    hint="leave them out",
                )
            norm, eps, gain, shift = _from_module(norm, d)
        _choice("norm", norm, NormKind)
        if eps is None:
            if norm not in DEFAULT_EPS:
                raise UsageError(f"norm={norm!r} needs its eps", hint="for example eps=1e-6")
            eps = DEFAULT_EPS[norm]
        if shift is not None and norm != "layernorm":
            raise UsageError(f"shift goes with norm='layernorm', and norm is {norm!r}")
        return norm, eps, _optional("gain", gain, (d,)), _optional("shift", shift, (d,))

    def _stacked(self, d: int, n: int) -> _Experts:
        """The experts from w1, b1, w2 and b2."""
        kind = self.expert or ("linear" if self.w2 is None else "mlp")
        _choice("expert", kind, ExpertKind)
        if self.w1 is None or (self.w2 is None) != (kind == "linear"):
            wanted = "w1 alone" if kind == "linear" else "w1 and w2"
            raise UsageError(
                f"experts of the kind {kind} are given by {wanted}",
                hint="experts=[(first, second), …], or the stacked w1 [n, d, h] and w2 [n, h, o]",
            )
        w1 = _tensor("w1", self.w1, (3,), "[n, d, h]")
        inner = w1.shape[2]
        _shape("w1", w1, (n, d, inner), "[n, d, h]: the input's axis before the output's (.mT?)")
        b1 = _optional("b1", self.b1, (n, inner), "[n, h], as many columns as w1")
        if self.w2 is None:
            return kind, w1, b1, None, None
        w2 = _tensor("w2", self.w2, (3,), "[n, h, o]")
        hidden = _hidden(kind, "w1", "w2", inner, w2.shape[1])
        _shape("w2", w2, (n, hidden, w2.shape[2]), "[n, h, o]: the input's axis first (.mT?)")
        b2 = _optional("b2", self.b2, (n, w2.shape[2]), "[n, o], as many columns as w2")
        return kind, w1, b1, w2, b2

    def _listed(self, d: int, n: int) -> _Experts:
        """The experts from a list of them; their matrices are views, one per expert."""
        experts = _listed(self.experts, self.w1, self.b1, self.w2, self.b2)
        if len(experts) != n:
            slots = n // len(experts) if experts and n % len(experts) == 0 else 0
            raise UsageError(
                f"experts has {len(experts)} entries, and phi {list(self.phi.shape)} is for "
                f"n = {n}",
                hint=f"{slots} slots per expert: phi.unflatten(1, ({len(experts)}, {slots})) where "
                "an expert's slots stand together"
                if slots and self.phi.ndim == 2
                else "experts=[(e.up, e.down) for e in layer.experts]; phi is [d, n, p]",
            )
        counts = {len(maps) for maps in experts}
        if len(counts) > 1:
            raise UsageError(f"some experts have {min(counts)} maps and others {max(counts)}")
        count = counts.pop()
        kinds: Mapping[int, ExpertKind] = {1: "linear", 2: "mlp", 3: "geglu"}
        kind = self.expert or kinds[count]
        _choice("expert", kind, ExpertKind)
        if (count == 1) != (kind == "linear"):
            raise UsageError(f"expert={kind!r} and experts of {min(count, 2)} maps each")
        why = "[out, in] with in d"
        hidden = partial(_hidden, kind, "experts[0]: its first", "its second")
        return kind, *_stacked_maps(experts, d, why, hidden)


Statistics = tuple[Tensor, Tensor]
"""Recorded mean and variance [n] of a level's logits."""

Factors = Sequence[Tensor] | nn.ParameterList

TensorForm = Tensor | Factors | tuple[Tensor, Factors]
"""A weight tensor: whole, [n_1, …, d, o]; by its CP factors or TR cores; Tucker's core, factors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MuMoEDescription:
    """A muMoE layer: y = W(a_1, …, a_E, x) for each token, a_e = activation(norm(x·gate_e)).

    `gates` holds a matrix [d, n_e] or an `nn.Linear` per level of experts. `weights` is the whole
    tensor [n_1, …, d, o]; its CP factors [n_1, R], …, [d, R], [o, R] or TR cores [r1, n_1, r2], …,
    [r, d, r'], [r', o, r1] as a list; or for Tucker (core, factors). One row more of the input
    mode, d + 1, is the bias. `second` is a second tensor in the same form, after a GELU.

    `norm` stands before the `activation` (`entmax15`, `sparsemax` or `softmax`): `none`; `ln`, a
    layer normalisation over the experts without gain and shift, eps 1e-5; or a list with each
    level's `nn.BatchNorm1d`, or its recorded (mean, variance) for eps 1e-5. `input_norm` is an
    `nn.LayerNorm` of what the tensors see; the gate sees x itself.

    Raises UsageError, naming the argument and what was expected.
    """

    advice: ClassVar[str] = (
        "each level's coefficients are activation(norm(x·gate)), and the tensor is multiplied with "
        "all of them and x"
    )

    gates: Sequence[nn.Linear | Tensor] | nn.ModuleList | nn.ParameterList
    weights: TensorForm
    second: TensorForm | None = None
    norm: Literal["none", "ln"] | Sequence[nn.Module | Statistics] | nn.ModuleList
    activation: GateActivation = "entmax15"
    input_norm: nn.LayerNorm | None = None

    def build(self, name: str) -> MuMoE:
        """Returns the layer that computes this."""
        _choice("activation", self.activation, GateActivation)
        projections, biases = self._gates()
        d, levels = projections[0].shape[0], tuple(each.shape[1] for each in projections)
        means: list[Tensor] = []
        if self.norm == "ln":
            if any(bias.any() for bias in biases):
                raise UsageError(
                    "norm='ln' normalises x·gate, and the gate has a bias besides",
                    hint="such a layer cannot be exported",
                )
        else:
            projections, means = self._folded(projections, biases)
        specs, tensors, width = [], [], d
        for what, form in (("weights", self.weights), ("second", self.second)):
            if form is None:
                continue
            named = _named(what, form)
            try:
                specs.append(read_tensor("moexport.MuMoE", what, named, levels, width))
            except CheckpointError as error:
                raise UsageError(
                    error.message.replace("projs.*", "gates"), hint=error.hint
                ) from error
            tensors.append(tuple(named[key] for key in tensor_names(specs[-1])))
            width = specs[-1].out
        if len({each.form for each in specs}) > 1:
            raise UsageError(
                f"weights is in the form {specs[0].form} and second in {specs[1].form}",
                hint="both tensors of a layer are in one form",
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
        )
        # The norm is folded into the gate: this variance divides by 1.
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

    def variants(self) -> Iterator[tuple[dict[str, str], MuMoEDescription]]:
        """Yields the same weights with every combination of the few options, and what changed."""
        biased = any(bias.any() for bias in self._gates()[1])
        norms: list[Any] = [self.norm, *(n for n in ("none", "ln") if n != self.norm)]
        if biased:
            norms = [norm for norm in norms if norm != "ln"]
        for norm, activation in product(norms, get_args(GateActivation)):
            changed = {} if norm is self.norm else {"norm": repr(norm)}
            if activation != self.activation:
                changed["activation"] = repr(activation)
            yield changed, replace(self, norm=norm, activation=activation)

    def _gates(self) -> tuple[list[Tensor], list[Tensor]]:
        """Each level's projection [d, n] and bias [n]."""
        projections, biases = [], []
        gates = _several(self.gates)
        if not gates:
            raise UsageError(
                "gates is not a list of a gate per level of experts", hint="gates=[layer.gate]"
            )
        for level, gate in enumerate(gates):
            what, bias = f"gates[{level}]", None
            if isinstance(gate, nn.Module):
                weight, bias = _linear(what, gate)
                projection = weight.T
            else:
                projection = _tensor(what, gate, (2,), "[d, n]")
            projections.append(projection)
            n = projection.shape[1]
            _shape(what, projection, (projections[0].shape[0], n), "[d, n], d inputs")
            biases.append(projection.new_zeros(n) if bias is None else bias)
        return projections, biases

    def _folded(
        self, projections: list[Tensor], biases: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The projections with the batch normalisation in them, and what is then subtracted."""
        if self.norm == "none":
            return projections, [-bias for bias in biases]
        norms = _several(self.norm)
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
class ExpertsDescription:
    """Experts that a router chooses: y_t = Σ_j weights[t, j] · expert_{index[t, j]}(x_t).

    `router` is any code of the user's own: a method or function that takes what the layer is called
    with and returns index [..., k], of whole numbers from 0 to n - 1, and weights [..., k], for the
    tokens x [..., d]. It is traced as it is. A parameter `k` of it says that it can be asked for
    another number of experts, which `--k` then does. Without a `router` the layer described is one
    that is called with them: `experts(x, index, weights)`.

    `experts` are n `(first, second)` pairs of `nn.Linear` or weights [out, in], which compute
    second(act(first(x))); or `(gate, up, second)`: second(act(gate(x)) · up(x)). Instead of
    `experts` the stacked `w1` [n, d, h], `b1` [n, h], `w2` [n, h, o] and `b2` [n, o], inputs first,
    of which `w1` and `w2` may be lists of n matrices; with a `gate`, `w1` is [n, d, 2h], and its
    columns `concatenated`, gate before up, or `interleaved`: gate, up, gate, …

    `activation` is `silu`, which is z·sigmoid(alpha·z), `gelu`, `gelu-tanh`, `relu` or `relu2`,
    max(z, 0)². With a gate, `limit` bounds the gate from above and up to -limit … limit before it,
    and `up_offset` is added to up. `weights_on` says what the weights multiply: the experts'
    `output` or their `input`.

    Raises UsageError, naming the argument and what was expected.
    """

    advice: ClassVar[str] = (
        "index has the number of each token's experts and weights what each is multiplied with; "
        "what the layer adds besides (a shared expert, its input) belongs into a module around it"
    )

    router: Router | None = None
    experts: Sequence[Expert] | nn.ModuleList | None = None
    w1: Tensor | Sequence[Tensor] | None = None
    b1: Tensor | None = None
    w2: Tensor | Sequence[Tensor] | None = None
    b2: Tensor | None = None
    gate: Gate | None = None
    activation: ExpertActivation = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    weights_on: WeightsOn = "output"

    def build(self, name: str, k: int = 1) -> Experts:
        """Returns the experts alone, of which the router chooses k."""
        _choice("activation", self.activation, ExpertActivation)
        _choice("weights_on", self.weights_on, WeightsOn)
        if self.gate is not None:
            _choice("gate", self.gate, Gate)
        if self.router is not None and not callable(self.router):
            raise UsageError(
                f"router is a {type(self.router).__name__}, not a function",
                hint="router=layer.route, which returns index [..., k] and weights [..., k]",
            )
        gate, w1, b1, w2, b2 = self._parts()
        if gate == "none" and (self.limit is not None or self.up_offset):
            raise UsageError("limit and up_offset go with a gate", hint="leave them out")
        if self.activation != "silu" and self.alpha != 1.0:
            raise UsageError(
                f"alpha={self.alpha:g} goes with activation='silu', and activation is "
                f"{self.activation!r}",
                hint="leave it out",
            )
        d, (hidden, out) = w1[0].shape[0], w2[0].shape
        spec = ExpertsSpec(
            name=name,
            experts=len(w1),
            k=k,
            dim=d,
            hidden=hidden,
            out=out,
            activation=self.activation,
            gate=gate,
            alpha=self.alpha,
            limit=self.limit,
            up_offset=self.up_offset,
            weights_on=self.weights_on,
        )
        return Experts(spec, ExpertsWeights(w1, w2, b1, b2)).eval()

    def variants(self) -> Iterator[tuple[dict[str, str], ExpertsDescription]]:
        """Yields the same weights with every combination of the few options, and what changed."""
        gated = self.build("").spec.gate != "none"
        said = self.activation, self.alpha
        forms = dict.fromkeys([said, *((each, 1.0) for each in get_args(ExpertActivation))])
        for (activation, alpha), weights_on, exchanged in product(
            forms, get_args(WeightsOn), (False, True) if gated else (False,)
        ):
            changed = {} if activation == said[0] else {"activation": repr(activation)}
            if alpha != said[1] and not changed:
                changed["alpha"] = f"{alpha:g}"
            if weights_on != self.weights_on:
                changed["weights_on"] = repr(weights_on)
            other = self
            if exchanged:
                changed["gate and up"] = "exchanged"
                other = self._exchanged()
            yield changed, replace(other, activation=activation, alpha=alpha, weights_on=weights_on)

    def tensors(self) -> Iterator[Tensor]:
        """Yields the experts' weights as they were given."""
        if self.experts is None:
            for given in (self.w1, self.b1, self.w2, self.b2):
                if given is not None:
                    yield from (given,) if isinstance(given, Tensor) else given
            return
        for weight, bias in (each for maps in _listed(self.experts) for each in maps):
            yield weight
            if bias is not None:
                yield bias

    def _exchanged(self) -> ExpertsDescription:
        gate, w1, b1, w2, b2 = self._parts()

        def other(columns: Tensor) -> Tensor:
            if gate == "concatenated":
                return torch.cat(columns.chunk(2, dim=-1)[::-1], dim=-1)
            return torch.stack([columns[..., 1::2], columns[..., ::2]], dim=-1).flatten(-2)

        first, second = (torch.stack(tuple(each)) for each in (w1, w2))
        bias = None if b1 is None else other(b1)
        return replace(self, experts=None, gate=gate, w1=other(first), b1=bias, w2=second, b2=b2)

    def _parts(self) -> _Routed:
        return self._stacked() if self.experts is None else self._listed()

    def _stacked(self) -> _Routed:
        """The experts from w1, b1, w2 and b2."""
        if self.w1 is None or self.w2 is None:
            raise UsageError(
                "experts are given by w1 and w2",
                hint="experts=[(first, second), …], or the stacked w1 [n, d, h] and w2 [n, h, o]",
            )
        gate: Gate = self.gate or "none"
        w1 = _matrices("w1", self.w1, "[n, d, h], or with a gate [n, d, 2h]")
        w2 = _matrices("w2", self.w2, "[n, h, o]")
        n, (d, inner), (rows, out) = len(w1), w1[0].shape, w2[0].shape
        hidden = inner if gate == "none" else inner // 2
        if (len(w2), rows) != (n, hidden) or (gate != "none" and inner % 2):
            wide = gate == "none" and (len(w2), rows) == (n, inner // 2)
            raise UsageError(
                f"w1 {[n, d, inner]} gives {hidden} numbers after its activation, and w2 "
                f"{[len(w2), rows, out]} takes {rows}",
                hint="gate='concatenated', or 'interleaved', if one half of them gates the other"
                if wide
                else "both are inputs first, [n, in, out]: is one transposed (.mT)?",
            )
        b1 = _optional("b1", self.b1, (n, inner), "as many columns as w1")
        b2 = _optional("b2", self.b2, (n, out), "as many columns as w2")
        return gate, w1, b1, w2, b2

    def _listed(self) -> _Routed:
        """The experts from a list of them; their matrices are views, one per expert."""
        experts = _listed(self.experts, self.w1, self.b1, self.w2, self.b2)
        counts = {len(maps) for maps in experts}
        if len(counts) != 1 or not counts <= {2, 3}:
            raise UsageError(
                "experts is not a list of pairs or of triples",
                hint="experts=[(e.up, e.down) for e in layer.experts], or (gate, up, down)",
            )
        triples = counts == {3}
        if triples and self.gate not in (None, "concatenated"):
            raise UsageError(f"gate={self.gate!r} and experts of three maps", hint="leave gate out")
        gate: Gate = "concatenated" if triples else self.gate or "none"
        w1, b1, w2, b2 = _stacked_maps(
            experts,
            experts[0][0][0].shape[1],
            "[out, in], as of the others",
            lambda inner, _: inner if gate == "none" else inner // 2,
        )
        assert w2 is not None
        return gate, w1, b1, w2, b2


_Routed = tuple[Gate, Matrices, Tensor | None, Matrices, Tensor | None]
"""How a gate lies in w1, w1, b1, w2 and b2."""

_Experts = tuple[ExpertKind, Matrices, Tensor | None, Matrices | None, Tensor | None]
"""The kind of expert, w1, b1, w2 and b2."""


def _matrices(what: str, given: Tensor | Sequence[Tensor], expected: str) -> Matrices:
    """Stacked matrices, or n of one shape."""
    if isinstance(given, Tensor):
        return _tensor(what, given, (3,), expected)
    listed = [
        _tensor(f"{what}[{e}]", each, (2,), f"a matrix of {expected}")
        for e, each in enumerate(_several(given))
    ]
    if not listed or len({each.shape for each in listed}) > 1:
        raise UsageError(f"{what} holds {len(listed)} matrices that are not of one shape")
    return tuple(listed)


_Map = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out]."""


def _maps(what: str, expert: object) -> list[_Map]:
    """The one, two or three linear maps of an expert."""
    alone = isinstance(expert, Tensor) or _is_weight_and_bias(expert)
    alone |= isinstance(expert, nn.Module) and not isinstance(expert, nn.ModuleList)
    listed = [expert] if alone else _several(expert)
    if not 1 <= len(listed) <= 3:
        raise UsageError(
            f"{what} is a {type(expert).__name__}, not (first, second)",
            hint="a pair of nn.Linear or of weights [out, in]; (value, gate, second) for GEGLU",
        )
    return [_linear(f"{what}[{i}]" if len(listed) > 1 else what, m) for i, m in enumerate(listed)]


def _is_weight_and_bias(given: object) -> bool:
    """Whether this is one map: a matrix with a vector, where two matrices are two maps."""
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[0], Tensor)
        and given[0].ndim > 1
        and (given[1] is None or (isinstance(given[1], Tensor) and given[1].ndim == 1))
    )


def _linear(what: str, given: object) -> _Map:
    """Weight and bias of a linear layer or a 1×1 convolution, or as they were given."""
    pair: Any = given
    if isinstance(given, nn.Module):
        pair = getattr(given, "weight", None), getattr(given, "bias", None)
    elif isinstance(given, Tensor):
        pair = given, None
    if not _is_weight_and_bias(pair) or any(size != 1 for size in pair[0].shape[2:]):
        shown = f" of shape {list(given.shape)}" if isinstance(given, Tensor) else ""
        raise UsageError(
            f"{what} is a {type(given).__name__}{shown}, not a linear map",
            hint="give an nn.Linear, its weight [out, in], or (weight, bias)",
        )
    weight = _tensor(what, pair[0], (2, 3, 4), "[out, in]").flatten(1)
    return weight, _optional(f"{what}'s bias", pair[1], (weight.shape[0],))


def _below(value: _Map, gate: _Map) -> _Map:
    """Two maps of one input as one, the first one's outputs before the second's."""
    if value[0].shape != gate[0].shape:
        raise UsageError(
            f"a gated expert's first two weights are {list(value[0].shape)} and "
            f"{list(gate[0].shape)}",
            hint="of three maps the first two have one shape, [h, d]",
        )
    biases = _biases([value, gate])
    return torch.cat([value[0], gate[0]]), None if biases is None else biases.flatten()


def _biases(maps: list[_Map]) -> Tensor | None:
    """The biases stacked, [n, out]; None where no map has one."""
    if all(bias is None for _, bias in maps):
        return None
    return torch.stack([w.new_zeros(w.shape[0]) if bias is None else bias for w, bias in maps])


def _hidden(kind: ExpertKind, first: str, second: str, inner: int, columns: int) -> int:
    """h, which the second map takes, where the first one gives h, or 2h for GEGLU."""
    hidden = inner // 2 if kind == "geglu" else inner
    if columns != hidden:
        wide = kind == "mlp" and inner == 2 * columns
        raise UsageError(
            f"{first} map gives {inner} numbers and {second} takes {columns}; "
            f"expert={kind!r} would take {hidden}",
            hint="expert='geglu' if one half of them gates the other"
            if wide
            else "is one transposed? nn.Linear and pairs have [out, in], w1 and w2 [in, out]",
        )
    return hidden


def _from_module(norm: nn.Module, d: int) -> tuple[NormKind, float, Tensor | None, Tensor | None]:
    """A normalisation layer as `SoftMoESpec` has it."""
    gain, shape = getattr(norm, "weight", None), getattr(norm, "normalized_shape", None)
    if isinstance(norm, nn.LayerNorm | nn.RMSNorm) and tuple(shape or ()) != (d,):
        raise UsageError(f"norm is over {list(shape or ())}, and phi is for tokens of width {d}")
    if isinstance(norm, nn.LayerNorm):
        return "layernorm", norm.eps, gain, norm.bias
    if isinstance(norm, nn.RMSNorm):
        # x / √(Σx²/d + eps)·γ = x / √(Σx² + d·eps)·√d·γ
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        gain = torch.ones(d) if gain is None else gain
        return "l2-rsqrt", d * eps, gain * d**0.5, None
    raise UsageError(
        f"norm is a {type(norm).__name__}", hint="nn.LayerNorm, nn.RMSNorm, or norm='l2' and so on"
    )


def _input_norm(norm: nn.LayerNorm, d: int) -> tuple[Tensor, Tensor]:
    """Gain and shift [d] of an input normalisation, whose eps the lowerings fix."""
    if not isinstance(norm, nn.LayerNorm) or norm.normalized_shape != (d,) or norm.eps != NORM_EPS:
        raise UsageError(
            f"input_norm is {norm}", hint=f"nn.LayerNorm({d}, eps={NORM_EPS:g}) is what can be"
        )
    gain, shift = (
        _optional("input_norm", norm.weight, (d,)),
        _optional("input_norm", norm.bias, (d,)),
    )
    return torch.ones(d) if gain is None else gain, torch.zeros(d) if shift is None else shift


def _batch_norm(what: str, norm: object, n: int) -> tuple[Tensor, Tensor]:
    """Scale and shift [n] in float64: what a batch normalisation does in eval mode."""
    given: tuple[object, object] = (None, None)
    gain, bias, eps = torch.ones(n), torch.zeros(n), NORM_EPS
    if isinstance(norm, nn.BatchNorm1d):
        given, eps = (norm.running_mean, norm.running_var), norm.eps
        gain = gain if norm.weight is None else norm.weight.detach()
        bias = bias if norm.bias is None else norm.bias.detach()
    elif isinstance(norm, tuple) and len(norm) == 2:
        given = norm
    mean, variance = given
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        raise UsageError(
            f"{what} is a {type(norm).__name__} without statistics",
            hint="give the nn.BatchNorm1d of the level, or its (mean, variance)",
        )
    for name, each in (("mean", mean), ("variance", variance)):
        _shape(f"{what}: its {name}", each, (n,), "[n], a number per expert")
    scale = gain.double() / torch.sqrt(variance.double() + eps)
    return scale, bias.double() - mean.double() * scale


def _named(what: str, form: TensorForm) -> dict[str, Tensor]:
    """A weight tensor's parts under the published names."""
    if isinstance(form, Tensor):
        return {WHOLE: _tensor(what, form, None, "[n, …, d, o]")}
    parts = _several(form)
    named: dict[str, Any] = {}
    if len(parts) == 2 and not isinstance(parts[1], Tensor):
        named[CORE], parts = parts[0], _several(parts[1])
    named |= {f"{FACTORS}.{i}": part for i, part in enumerate(parts)}
    if not parts or not all(isinstance(each, Tensor) for each in named.values()):
        raise UsageError(
            f"{what} is a {type(form).__name__}, not a weight tensor",
            hint="the whole tensor, a list of its factors or cores, or (core, factors) for Tucker",
        )
    return {key: _tensor(f"{what}.{key}", each, None, "") for key, each in named.items()}


def _several(given: object) -> list[Any]:
    """The entries of a list, of PyTorch's own kinds too; empty for what is none."""
    is_list = isinstance(given, list | tuple | nn.ModuleList | nn.ParameterList)
    return list(given) if is_list else []  # type: ignore[call-overload]


def _listed(experts: object, *stacked: object) -> list[list[_Map]]:
    """The maps of listed experts, which must not be given as stacked tensors as well."""
    if any(each is not None for each in stacked):
        raise UsageError(
            "the experts are given twice: experts and w1, b1, w2 or b2", hint="give one of them"
        )
    return [_maps(f"experts[{e}]", expert) for e, expert in enumerate(_several(experts))]


def _stacked_maps(
    experts: list[list[_Map]], d: int, why: str, hidden: Callable[[int, int], int]
) -> tuple[Matrices, Tensor | None, Matrices | None, Tensor | None]:
    """w1, b1, w2 and b2 of experts with one, two or three maps each, from width d.

    The matrices are views, one per expert; of three maps the first two are one below the other.
    `hidden` says from a first map's outputs and a second one's inputs how many those must be.
    """
    if len(experts[0]) == 3:
        experts = [[_below(*first), last] for *first, last in experts]
    inner = experts[0][0][0].shape[0]
    for e, maps in enumerate(experts):
        _shape(f"experts[{e}]: its first weight", maps[0][0], (inner, d), why)
    w1, b1 = tuple(maps[0][0].T for maps in experts), _biases([maps[0] for maps in experts])
    if len(experts[0]) == 1:
        return w1, b1, None, None
    out, columns = experts[0][1][0].shape
    wanted = (out, hidden(inner, columns))
    for e, maps in enumerate(experts):
        what = f"experts[{e}]: its last weight"
        _shape(what, maps[1][0], wanted, "[out, in] with the first one's width in")
    w2, b2 = tuple(maps[1][0].T for maps in experts), _biases([maps[1] for maps in experts])
    return w1, b1, w2, b2


def _tensor(what: str, given: object, ranks: tuple[int, ...] | None, expected: str) -> Tensor:
    """A tensor of one of these ranks, detached, in float32."""
    if not isinstance(given, Tensor):
        raise UsageError(f"{what} is a {type(given).__name__}, not a tensor {expected}".rstrip())
    if ranks is not None and given.ndim not in ranks:
        raise UsageError(f"{what} has the shape {list(given.shape)}, expected {expected}")
    return given.detach().to(torch.float32)


def _optional(
    what: str,
    given: Tensor | None,
    expected: tuple[int, ...],
    why: str = "a number per channel",
) -> Tensor | None:
    if given is None:
        return None
    tensor = _tensor(what, given, None, str(list(expected)))
    _shape(what, tensor, expected, why)
    return tensor


def _shape(what: str, tensor: Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != expected:
        raise UsageError(
            f"{what} has the shape {list(tensor.shape)}, expected {list(expected)}: {why}"
        )


def _choice(what: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        listed = ", ".join(map(repr, get_args(choices)))
        raise UsageError(f"{what}={value!r} is not one of {listed}")


Description = SoftMoEDescription | MuMoEDescription | ExpertsDescription
