"""The speed targets: what is measured, and against what. `python -m benchmarks` runs them."""
