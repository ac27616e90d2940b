"""The speed targets: what is measured, and against what. `python -m perf` runs them."""
