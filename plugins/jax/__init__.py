"""Reads checkpoints of JAX: google-research/vmoe's files, and Orbax states."""
