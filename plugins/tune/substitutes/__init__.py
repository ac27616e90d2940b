"""Arrays that replace removed or merged experts: fitted, then trained."""
