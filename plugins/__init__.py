"""What moexport adds to its core, each by the door that plugins of others take, too."""
