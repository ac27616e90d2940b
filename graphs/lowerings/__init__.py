"""How the experts of a Soft MoE layer are computed in a target's ops: one module per way.

To add a lowering, write a module with a `LOWERING` record and name it in `registry`.
"""
