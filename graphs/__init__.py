"""What an exported MoE layer computes: the layers, routing and the lowerings."""
