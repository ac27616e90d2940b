"""What experts are for: their analyses, subgroups, specialisation."""
