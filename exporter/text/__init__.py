"""Text from the bundle of a language model."""
