"""What takes part in a benchmark: runtimes, by one contract."""
