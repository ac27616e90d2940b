"""Reads checkpoints of trainings in JAX: google-research/vmoe's files, and states of Orbax."""
