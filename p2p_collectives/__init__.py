"""Tutorial 6_4."""
