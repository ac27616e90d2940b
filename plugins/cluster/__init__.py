"""Distributes work to the nodes of a Ray cluster."""
