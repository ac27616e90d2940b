"""Measures a case: latency, memory, parts, and the minimum possible time."""
