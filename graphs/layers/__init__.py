"""A file per kind of MoE layer: specification, PyTorch reference and stored weights."""
