"""Experts with routers: models of `transformers`, and routers of a user's own."""
