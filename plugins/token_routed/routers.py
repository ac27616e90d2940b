"""Changes k, the number of experts of a token, in a loaded `transformers` model.

The model is built twice without weights, with two values of k, to find the attributes of its
modules that depend on k.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...errors import UsageError
from ...exporter.model import Model
from ...graphs.layers.base import sharing_weights
from .network import TransformersNetwork

FIELDS = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "num_selected_experts")
"""The fields of a configuration that may contain k."""


@dataclass(frozen=True, slots=True)
class Routers:
    """Where a model stores k: in a field of its configuration, and in attributes of its modules.

    `attributes` has pairs of a module's path and the name of its attribute. `trained` is the k of
    the configuration as it was loaded.
    """

    field: str
    trained: int
    attributes: tuple[tuple[str, str], ...]


def k_of(config: Any) -> tuple[str, int] | None:
    """Returns the field of a configuration that contains k, and k; None if there is none."""
    for field in FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value >= 1:
            return field, value
    return None


def find_routers(build: Callable[[Any], nn.Module], config: Any, experts: int) -> Routers | None:
    """Returns where the models of a configuration store k; `build` makes them without weights.

    Returns None if the configuration has no k. If k cannot change, there are no `attributes`.
    """
    field_and_k = k_of(config.get_text_config())
    if field_and_k is None:
        return None
    field, k = field_and_k
    other_k = k - 1 if k > 1 else k + 1
    if not 1 <= other_k <= experts:
        return Routers(field=field, trained=k, attributes=())
    changed = copy.deepcopy(config)
    setattr(changed.get_text_config(), field, other_k)
    try:
        first, second = build(config), build(changed)
    except (ValueError, NotImplementedError, AssertionError):
        return Routers(field=field, trained=k, attributes=())  # the architecture allows one k only
    attributes = []
    for (path, module), (_, twin) in zip(
        first.named_modules(), second.named_modules(), strict=True
    ):
        for name, value in vars(module).items():
            if isinstance(value, int) and value == k and vars(twin).get(name) == other_k:
                attributes.append((path, name))
    return Routers(field=field, trained=k, attributes=tuple(attributes))


def with_k(model: Model, k: Mapping[str, int | None]) -> Model:
    """Returns a model with the same weights and this k in each layer, as if configured like this.

    Returns the model itself if it was trained with this k or is not from `transformers`. Raises
    `UsageError` for a k that its architecture does not support.
    """
    network = model.module
    routers = getattr(network, "routers", None)
    if not isinstance(network, TransformersNetwork):
        return model
    if not isinstance(routers, Routers):
        if any(k.get(name) != layer.spec.trained_k for name, layer in model.layers.items()):
            raise UsageError(
                f"--k: the configuration of this {model.family} model has no k",
                hint="leave --k out: the model is then exported as it was trained",
            )
        return model
    if None in k.values():
        raise UsageError(
            "--k input: the k of this model's router is a constant of the graph",
            hint="export a bundle for each k: --k 4",
        )
    if set(k.values()) == {routers.trained}:
        return model
    if not routers.attributes:
        raise UsageError(
            f"--k: {model.family} models support only k = {routers.trained}", hint="leave --k out"
        )
    changed = sharing_weights(network)
    assert isinstance(changed, TransformersNetwork)
    layers = {path.rpartition(".")[0]: value for path, value in k.items()}
    ks = list(k.values())
    common = ks[0] if len(set(ks)) == 1 else None
    for path, name in routers.attributes:
        # The experts layer that the module is at or below.
        layer = next((p for p in layers if path == p or path.startswith(f"{p}.")), None)
        value = common if layer is None else layers[layer]
        if value is not None:
            setattr(changed.wrapped.get_submodule(path), name, value)
    if common is not None:  # the modules share one configuration
        setattr(changed.wrapped.config.get_text_config(), routers.field, common)
    setting: Any = ks if common is None else common
    return replace(model.with_module(changed), config={**model.config, routers.field: setting})
