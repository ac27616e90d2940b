"""What takes the places of experts that are dropped or merged for good: fitted, then trained."""
