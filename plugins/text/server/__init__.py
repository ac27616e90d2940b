"""Text by the protocol of OpenAI: requests, turns, connections."""
