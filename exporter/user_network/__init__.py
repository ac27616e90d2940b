"""A user's own network: its MoE layers found, described by adapters, replaced and compared."""
