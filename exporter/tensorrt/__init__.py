"""TensorRT engines: options, limits of the importers, building, caching and running."""
