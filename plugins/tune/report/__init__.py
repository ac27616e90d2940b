"""What a search found, in a results file and in a report."""
