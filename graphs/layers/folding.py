"""A muMoE layer's weights as its graph wants them: normalisation folded in, constants reshaped.

All of it is done in float64 when a bundle is written, so that no node does it at run time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from .base import StoredPart
from .edits import LayerEdits
from .mumoe import MuMoE
from .mumoe_spec import NORM_EPS, FactorisedSpec, MuMoESpec


def logit_scale(spec: MuMoESpec) -> float:
    """The factor on the logits before the activation: entmax15 works on halves."""
    return 0.5 if spec.activation == "entmax15" else 1.0


def folded(layer: MuMoE) -> Iterator[StoredPart]:
    """Yields the weights of the muMoE lowerings.

    By level `gate.{e}.weight` [d, n] and, with batch normalisation, `gate.{e}.bias` [n]; `gain` and
    `shift` [d] of the input normalisation; by tensor t and level e `tensor.{t}.expert.{e}`,
    `tensor.{t}.input`, `tensor.{t}.bias` and `tensor.{t}.output`, as matrices:

    CP [n, R], [d, R], [R], [R, o]; TR [n, r·r'], [d, r·r'], [r·r'], [r1·r', o]; Tucker
    [n, R_e], [d, R_d], [R_d], [R_o, o] and `tensor.{t}.core` [R_d, ΠR_e·R_o]. An unfactorised
    tensor is `tensor.{t}.experts` [N, o, d], a matrix per combination of experts, contiguous so
    that single ones can be gathered, and `tensor.{t}.biases` [N, o].

    An ablated expert's rows are zero. With re-written outputs, `rewrite.0` [n, o] of a layer with
    one level; with several `rewrite.{e}` [n, rewrites] and `rewrite.output` [rewrites, o].
    """
    spec = layer.spec
    for level, projection in enumerate(layer.projections):
        weight, bias = projection.double(), None
        if spec.norm == "bn":
            mean, variance = (t.double() for t in layer.statistics(level))
            scale = logit_scale(spec) / torch.sqrt(variance + NORM_EPS)
            weight, bias = weight * scale, -mean * scale
        yield _part(f"gate.{level}.weight", weight)
        if bias is not None:
            yield _part(f"gate.{level}.bias", bias)
    if layer.gain is not None and layer.shift is not None:
        yield _part("gain", layer.gain)
        yield _part("shift", layer.shift)
    for index, (tensor, module) in enumerate(zip(spec.tensors, layer.tensors, strict=True)):
        factors = module.factors
        assert isinstance(factors, nn.ParameterList)
        yield from _tensor(f"tensor.{index}", tensor, list(factors), layer.edits)
    if layer.edits.rewrites:
        yield from _rewrites(spec, layer.edits)


def _tensor(
    prefix: str, spec: FactorisedSpec, factors: list[Tensor], edits: LayerEdits
) -> Iterator[StoredPart]:
    if spec.form == "full":
        whole = factors[0]
        for level in range(len(spec.levels)):
            whole = _present(edits, level, level, whole)
        experts = whole.flatten(0, -3).mT  # [N, o, d + 1]
        weights = experts[:, :, : spec.dim]
        yield StoredPart(f"{prefix}.experts", tuple(weights.shape), map(_array, weights))
        if spec.bias:
            yield _part(f"{prefix}.biases", experts[:, :, spec.dim])
        return
    if spec.form == "tucker":
        core, *factors = factors
        yield _part(f"{prefix}.core", core.movedim(-2, 0).flatten(1))
    for level, factor in enumerate(factors[:-2]):
        yield _part(f"{prefix}.expert.{level}", _present(edits, level, 0, _by_mode(spec, factor)))
    inputs = _by_mode(spec, factors[-2])
    yield _part(f"{prefix}.input", inputs[: spec.dim])
    if spec.bias:
        yield _part(f"{prefix}.bias", inputs[spec.dim])
    yield _part(f"{prefix}.output", _by_output(spec, factors[-1]))


def _present(edits: LayerEdits, level: int, axis: int, tensor: Tensor) -> Tensor:
    """A tensor with a level's experts along an axis, the slices of the ablated ones zero."""
    ablated = edits.ablated_in(level)
    return tensor.index_fill(axis, torch.tensor(ablated), 0.0) if ablated else tensor


def _rewrites(spec: MuMoESpec, edits: LayerEdits) -> Iterator[StoredPart]:
    """Eq. 5 for all re-written outputs: y += Π_e(a_e·M_e)·Λ, multiplied out for one level."""
    strengths = torch.zeros(len(edits.rewrites), spec.out, dtype=torch.float64)
    for index, rewrite in enumerate(edits.rewrites):
        strengths[index, rewrite.output] = rewrite.strength
    means = []
    for level in range(len(spec.levels)):
        columns = torch.tensor(
            [rewrite.coefficients[level] for rewrite in edits.rewrites], dtype=torch.float64
        ).T
        means.append(_present(edits, level, 0, columns))
    if len(means) == 1:
        yield _part("rewrite.0", means[0] @ strengths)
        return
    for level, mean in enumerate(means):
        yield _part(f"rewrite.{level}", mean)
    yield _part("rewrite.output", strengths)


def _by_mode(spec: FactorisedSpec, factor: Tensor) -> Tensor:
    """A factor as a matrix with its mode's index as the rows: a core [r, n, r'] as [n, r·r']."""
    return factor.transpose(0, 1).flatten(1) if spec.form == "tr" else factor


def _by_output(spec: FactorisedSpec, factor: Tensor) -> Tensor:
    """The output factor [o, R] as [R, o], the output core [r', o, r1] as [r1·r', o]."""
    return factor.permute(2, 0, 1).flatten(0, 1) if spec.form == "tr" else factor.T


def _part(name: str, tensor: Tensor) -> StoredPart:
    array = _array(tensor)
    return StoredPart(name, array.shape, (array,))


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.to(torch.float32).numpy())
