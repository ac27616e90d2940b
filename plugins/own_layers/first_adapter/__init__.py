"""`moexport adapt`: finds a first adapter for a layer by trial, or writes one to complete."""
