"""Adapts messages to their reader: file names of documentation pages, options as typed."""
