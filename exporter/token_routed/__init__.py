"""Hosts of token-routed experts: models of `transformers` whose experts go through its interface."""
