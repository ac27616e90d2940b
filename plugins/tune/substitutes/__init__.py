"""Fits, then trains, the arrays that replace removed or merged experts."""
