"""Token-routed experts as a layer."""
