"""The computation of an exported MoE layer: layers, routing and lowerings."""
