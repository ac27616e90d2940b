"""Analyses in a results file: experts and subgroups of a classifier, and what a search found."""
