"""Text in several engines: time to the first token, tokens per second, and perplexity."""
