"""Requests a second at a bound of latency: batching, MLPerf's LoadGen, and what it finds."""
