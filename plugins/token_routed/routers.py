"""k of a `transformers` model: makes a model with another k from the one loaded.

The model is built twice without weights, for two k, to find the attributes of its modules that
depend on k.
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
"""The names of k in configurations."""


@dataclass(frozen=True, slots=True)
class Routers:
    """The places of k in a model.

    These are the configuration's field, and attributes of modules by their path. `trained` is the k
    of the configuration as it was loaded.
    """

    field: str
    trained: int
    attributes: tuple[tuple[str, str], ...]


def k_of(config: Any) -> tuple[str, int] | None:
    """Returns the field of a configuration with k, and k; None if there is none."""
    for field in FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value >= 1:
            return field, value
    return None


def find_routers(build: Callable[[Any], nn.Module], config: Any, experts: int) -> Routers | None:
    """Returns the places of k in the models that `build` makes of a configuration, without weights.

    Returns None if k cannot change.
    """
    text = config.get_text_config()
    field_and_k = k_of(text)
    if field_and_k is None:
        return None
    field, k = field_and_k
    other = k - 1 if k > 1 else k + 1
    if not 1 <= other <= experts:
        return Routers(field=field, trained=k, attributes=())
    changed = copy.deepcopy(config)
    setattr(changed.get_text_config(), field, other)
    try:
        one, two = build(config), build(changed)
    except (ValueError, NotImplementedError, AssertionError):
        return Routers(field=field, trained=k, attributes=())  # an architecture of one k only
    attributes = []
    for (path, module), (_, twin) in zip(one.named_modules(), two.named_modules(), strict=True):
        for name, value in vars(module).items():
            if isinstance(value, int) and value == k and vars(twin).get(name) == other:
                attributes.append((path, name))
    return Routers(field=field, trained=k, attributes=tuple(attributes))


def with_k(model: Model, k: Mapping[str, int | None]) -> Model:
    """Returns a model with each layer's k, as if its configuration had it, weights shared.

    The same model if it was trained with these k, or has no routers. Raises `UsageError` for a k
    that its architecture does not support.
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
            "--k input: the router of this model has its k in the graph",
            hint="export a bundle for each k: --k 4",
        )
    if set(k.values()) == {routers.trained}:
        return model
    if not routers.attributes:
        raise UsageError(
            f"--k: {model.family} models support only k = {routers.trained}",
            hint="leave --k out",
        )
    changed = sharing_weights(network)
    assert isinstance(changed, TransformersNetwork)
    layers = {path.rpartition(".")[0]: value for path, value in k.items()}
    ks = list(k.values())
    common = ks[0] if len(set(ks)) == 1 else None
    for path, name in routers.attributes:
        # The experts layer that the module is at or below.
        own = next((p for p in layers if path == p or path.startswith(f"{p}.")), None)
        value = common if own is None else layers[own]
        if value is not None:
            setattr(changed.wrapped.get_submodule(path), name, value)
    if common is not None:  # modules share one configuration
        setattr(changed.wrapped.config.get_text_config(), routers.field, common)
    setting: Any = ks if common is None else common
    return replace(model.with_module(changed), config={**model.config, routers.field: setting})
