"""Experts that are dropped for good: which go first, and the constants that take their places."""
