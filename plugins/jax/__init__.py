"""Reads JAX checkpoints: google-research/vmoe's files and Orbax states."""
