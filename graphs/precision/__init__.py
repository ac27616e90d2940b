"""The numeric types of a graph: 16-bit floats, integers, and the backbone's linear layers."""
