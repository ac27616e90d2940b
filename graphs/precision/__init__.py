"""In what numbers a graph computes: 16-bit floats, integers, and the backbone's linear layers."""
