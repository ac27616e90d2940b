"""What networks around muMoE layers share: numbered blocks, weights of their own, a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from ...errors import CheckpointError
from ...graphs.layers.mumoe import MuMoE
from .base import Built, Config, Family, Shape, Tensors, check_tensors
from .mumoe import ACTIVATION, LAYOUT, is_host

Host = TypeVar("Host", bound=nn.Module)


def host_family(
    name: str, summary: str, options: tuple[str, ...], build: Callable[[Tensors, Config], Built]
) -> Family:
    """Returns the family of a network whose MLPs are muMoE layers (`mumoe.HOSTS` tells it)."""
    return Family(
        name=name,
        summary=summary,
        options=(*options, ACTIVATION),
        detect=lambda tensors: is_host(tensors, name),
        build=build,
        layer=LAYOUT,
    )


def block_numbers(name: str, tensors: Tensors, prefix: str) -> range:
    """Returns the numbers of a network's blocks, whose keys begin with `prefix` and a number.

    Raises CheckpointError where one is missing.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    found = sorted({int(match[1]) for match in map(pattern.match, tensors) if match})
    if found != list(range(len(found))) or not found:
        raise CheckpointError(f"not the weights of a {name} model: {prefix}* are {found}")
    return range(len(found))


def filled(
    name: str,
    host: Host,
    tensors: Tensors,
    layers: Mapping[str, MuMoE],
    width: Callable[[str], int],
) -> Host:
    """Returns a host made on the meta device, with its weights, and its layers at their paths.

    `width` is what a layer at a path takes and gives. Raises CheckpointError where weights or a
    layer do not fit the host.
    """
    inside = tuple(f"{path}." for path in layers)
    own = {key: tensor for key, tensor in tensors.items() if not key.startswith(inside)}
    expected: dict[str, Shape] = {k: tuple(t.shape) for k, t in host.state_dict().items()}
    check_tensors(name, own, expected)
    for path, layer in layers.items():
        if (layer.spec.dim, layer.spec.out) != (width(path), width(path)):
            raise CheckpointError(
                f"{path}: a layer from {layer.spec.dim} to {layer.spec.out}, where the network is "
                f"{width(path)} wide"
            )
    host.load_state_dict(own, assign=True)
    for path, layer in layers.items():
        host.set_submodule(path, layer)
    return host.requires_grad_(False).eval()
