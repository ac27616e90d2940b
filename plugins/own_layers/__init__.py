"""Networks and mixture layers that users wrote themselves."""

from __future__ import annotations

from ...commands.command import Command

API = 1

COMMAND = Command(
    "adapt",
    "Write a first adapter for a layer of your own, checked against the layer's outputs.",
    "moexport adapt mynet:SoftMoE --set dim=64 --set num_experts=8",
    "moexport.plugins.own_layers.first_adapter.cli:adapt",
    20,
)
