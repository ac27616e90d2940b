"""Loads what a user names as a model: files, state dicts, networks and layers of the user's own."""
