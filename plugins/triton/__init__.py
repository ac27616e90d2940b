"""Bundles as a model repository of Triton Inference Server."""
