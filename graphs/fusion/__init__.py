"""Fuses the small ops around the layers that PyTorch's exporter writes into single ops."""
