"""A server of text with OpenAI's protocol: requests, turns, connections."""
