"""Measures a case: latency, memory, parts, and the least possible time."""
