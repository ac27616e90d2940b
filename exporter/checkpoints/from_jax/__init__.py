"""Checkpoints of training codes in JAX: of google-research/vmoe, and of Orbax."""
