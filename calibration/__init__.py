"""Observes the values of tensors on real inputs, and chooses ranges for INT8."""
