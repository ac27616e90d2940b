"""Checks with the user's data: labels, own outputs, expert choices, drift, plausible shapes."""
