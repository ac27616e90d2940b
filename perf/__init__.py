"""Benchmarks of speed; `python -m perf` runs them."""
