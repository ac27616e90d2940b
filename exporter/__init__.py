"""From a checkpoint to a bundle: load, trace, lower, verify, write."""
