"""`moexport adapt`: a first adapter for a layer, found by trying, or a start to complete."""
