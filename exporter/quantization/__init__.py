"""Calibrates a model, and finds the parts that must stay floats to keep an accuracy."""
