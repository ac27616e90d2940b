"""Finds examples of each expert and shows them with their images or texts."""
