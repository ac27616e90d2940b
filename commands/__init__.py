"""One module per command: its arguments, its options and its output."""
