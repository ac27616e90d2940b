"""Inputs: arrays, files, shards and iterables, in batches of named fields; no checkpoints."""
