"""Stores the outcome of a search in a results file, and shows it in a report."""
