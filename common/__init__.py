"""Code that is independent of models: console, text, atomic writes, timing, environment."""
