"""The outcome of a search in a results file and in a report."""
