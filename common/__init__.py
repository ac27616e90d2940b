"""What knows nothing of models: console, text, files written whole, timing, environment."""
