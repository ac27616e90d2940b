"""Faster forms of Soft MoE in PyTorch: experts as one product of stacked matrices, or `grouped_mm`.

A published network calls its experts one after the other; on a GPU, each launches its own kernels.
These forms are a fair baseline for a GPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UsageError
from ...exporter.model import Model
from ...graphs.layers.base import frozen, moe_layers, sharing_weights
from ...graphs.layers.soft_moe import SoftMoE

StackedForm = Literal["stacked", "grouped_mm"]


class GroupedSoftMoE(SoftMoE):
    """A Soft MoE whose experts are two grouped products, the rows of each expert together."""

    def _all_experts(self, slots: Tensor) -> Tensor:
        """Computes every expert on its slots: [b, n, p, d] to [b, n, p, o]."""
        b, n, p, d = slots.shape
        ends = torch.arange(1, n + 1, dtype=torch.int32, device=slots.device) * (b * p)
        assert isinstance(self.w1, nn.Parameter)

        def product(rows: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
            """Maps rows [n·b·p, in] to [b, n, p, out]."""
            y = F.grouped_mm(rows, weights, offs=ends).view(n, b, p, -1)
            y = y if bias is None else y + bias[:, None, None]
            return y.transpose(0, 1)

        hidden = product(slots.transpose(0, 1).reshape(-1, d), self.w1, self.b1)
        if self.w2 is not None:
            assert isinstance(self.w2, nn.Parameter)
            rows = self.activate(hidden).transpose(0, 1).reshape(n * b * p, -1)
            hidden = product(rows, self.w2, self.b2)
        return self._outputs(hidden, None)


def in_stacked_form(model: Model, form: StackedForm) -> nn.Module:
    """Returns a model's network with its experts in a faster form; other weights are shared.

    Raises `UsageError` for layers without this form, or a PyTorch without `grouped_mm`.
    """
    if form == "grouped_mm" and not hasattr(F, "grouped_mm"):
        raise UsageError(f"PyTorch {torch.__version__} has no grouped_mm", hint="use 2.10 or newer")
    module = sharing_weights(model.module if model.as_trained is None else model.as_trained)
    for name, layer in moe_layers(module).items():
        if not isinstance(layer, SoftMoE):
            raise UsageError(f"{name}: a {layer.spec.kind} layer has no {form} form")
        spec = layer.spec
        widths = [width for width in (spec.dim, spec.inner, spec.hidden, spec.out) if width % 4]
        if form == "grouped_mm" and widths:
            raise UsageError(
                f"{name}: grouped_mm needs row widths that are multiples of 4, not {widths[0]}"
            )
        for weight in ("w1", "w2"):
            matrices = getattr(layer, weight)
            if isinstance(matrices, nn.ParameterList):
                delattr(layer, weight)
                setattr(layer, weight, frozen(torch.stack(list(matrices))))
            elif matrices is not None and form == "grouped_mm":
                setattr(layer, weight, frozen(matrices.contiguous()))
        if form == "grouped_mm":
            layer.__class__ = GroupedSoftMoE
    return module
