"""Fuses the small ops that PyTorch's exporter writes around the layers into single ops."""
