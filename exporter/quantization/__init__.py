"""Calibrating a model, and the search for what INT8 leaves in floats to keep an accuracy."""
