"""Lowerings of token-routed experts: one module per way to compute them."""
