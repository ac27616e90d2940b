"""Bundles on disk: destination, manifest and weights; opening, verifying and running them."""
