"""Each kind of MoE layer in one file: what it is, its PyTorch reference, its stored weights."""
