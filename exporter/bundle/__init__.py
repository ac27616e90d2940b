"""A bundle on disk: its destination, manifest and weights; opening, verifying and running it."""
