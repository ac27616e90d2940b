"""How good and how fast: accuracy, routing and latency against the PyTorch original."""
