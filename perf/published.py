"""A muMoE layer computed by the calls that its authors' code makes, to be timed beside ours.

That code (github.com/james-oldfield/muMoE, `MuMoE.py` at 3fa814b) is not a package, and this is no
copy of it. It is written to the same calls: `einops.einsum`, at CP's end over three operands;
`BatchNorm1d` with the experts moved before the tokens and back; `entmax15` of the package entmax.
One level of experts, as all of the papers' shapes that are measured here.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from entmax import entmax15
from moexport.graphs.layers.mumoe import MuMoE
from moexport.graphs.layers.mumoe_spec import FactorisedSpec
from torch import Tensor, nn


class PublishedMuMoE(nn.Module):
    """The weights of a `MuMoE` of one level, entmax15 and no edits, in the published calls."""

    def __init__(self, layer: MuMoE) -> None:
        super().__init__()
        (self.experts,) = layer.spec.levels
        self.spec = layer.spec
        self.projection = layer.projections[0]
        self.factors = [[*held.factors] for held in layer.tensors]  # type: ignore[misc]
        self.norm: nn.Module
        if self.spec.norm == "bn":
            self.norm = nn.BatchNorm1d(self.experts, affine=False)
            mean, variance = layer.statistics(0)
            self.norm.load_state_dict({"running_mean": mean, "running_var": variance}, strict=False)
        else:
            self.norm = nn.LayerNorm(self.experts, elementwise_affine=False)
        self.input_norm: nn.Module = nn.Identity()
        if layer.gain is not None:
            self.input_norm = nn.LayerNorm(self.spec.dim)
            self.input_norm.load_state_dict({"weight": layer.gain, "bias": layer.shift})
        self.gelu = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens x [b, m, d] to [b, m, o]."""
        logits = x @ self.projection
        if self.spec.norm == "bn":
            logits = rearrange(self.norm(rearrange(logits, "b m n -> b n m")), "b n m -> b m n")
        else:
            logits = self.norm(logits)
        a = entmax15(logits, dim=-1)
        x = self.input_norm(x)
        for index, (spec, factors) in enumerate(zip(self.spec.tensors, self.factors, strict=True)):
            if index:
                x = self.gelu(x)
            x = _contracted(spec, factors, a, x)
        return x


def _contracted(spec: FactorisedSpec, factors: list[Tensor], a: Tensor, z: Tensor) -> Tensor:
    """Returns W(a, z) [b, m, o] for coefficients a [b, m, n] and inputs z [b, m, d]."""
    experts, inputs, outputs = factors
    if spec.bias:
        z = torch.cat((z, torch.ones(*z.shape[:-1], 1, device=z.device)), dim=-1)
    if spec.form == "cp":
        of_experts = einsum(a, experts, "b m n, n r -> b m r")
        of_inputs = einsum(z, inputs, "b m d, d r -> b m r")
        return einsum(of_experts, of_inputs, outputs, "b m r, b m r, o r -> b m o")
    if spec.form == "tr":
        of_experts = einsum(a, experts, "b m n, q n r -> b m q r")
        of_inputs = einsum(z, inputs, "b m d, r d s -> b m r s")
        ring = einsum(of_inputs, of_experts, "b m r s, b m q r -> b m q s")
        return einsum(outputs, ring, "s o q, b m q s -> b m o")
    raise ValueError(f"{spec.form}: the published code has cp and tr")
