"""Tutorials 6_2 and 6_7."""
