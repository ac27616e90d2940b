"""Loads models from files, state dicts, and the user's own networks and layers."""
