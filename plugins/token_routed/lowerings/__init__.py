"""How token-routed experts are computed in a target's ops: one module per way."""
