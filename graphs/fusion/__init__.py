"""Puts one op in the place of the many that PyTorch's exporter writes around the layers."""
