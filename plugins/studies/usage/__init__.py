"""Counts how often each expert is chosen, by class and layer."""
