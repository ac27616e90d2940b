"""moexport."""
