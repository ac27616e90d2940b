"""Checks that a graph computes the model, and that the model and its data are plausible."""
