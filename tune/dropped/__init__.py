"""Experts that are dropped or merged for good: which go first, and what takes their places."""
