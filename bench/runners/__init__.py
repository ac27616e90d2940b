"""The runtimes in a benchmark, behind one interface."""
