"""What a benchmark measures of a case: latency, memory, parts, and the least time possible."""
