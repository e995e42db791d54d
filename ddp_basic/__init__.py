"""Tutorial 6_3."""
