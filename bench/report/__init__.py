"""Views of `results.json`: page, figures, tables, text, and comparisons with earlier results."""
