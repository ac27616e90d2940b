"""Distributes work over the nodes of a Ray cluster."""
