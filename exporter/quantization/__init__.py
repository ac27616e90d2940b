"""Calibrates a model, and finds the parts that must stay in floats to retain its accuracy."""
