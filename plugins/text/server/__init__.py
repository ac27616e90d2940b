"""The server for `moexport serve`, which generates text with OpenAI's protocol."""
