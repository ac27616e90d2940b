"""Models of `transformers` whose experts go through its experts interface."""
