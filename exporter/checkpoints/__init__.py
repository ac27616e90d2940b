"""From what a user names to a model: files, state dicts, networks and layers of one's own."""
