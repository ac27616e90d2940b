"""Measures how much quality a candidate keeps: data split, metric and confirmation."""
