"""TensorRT engines: what may be asked, what the importers take, building, keeping and running."""
