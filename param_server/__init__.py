"""Tutorials 6_6 and 6_8, first half: parameter servers."""
