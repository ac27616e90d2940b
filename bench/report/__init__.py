"""Views of `results.json`: the page, figures, tables, text, and comparisons with earlier results."""
