"""Text from the bundle of a language model: tokenizer files, generation, serving."""
