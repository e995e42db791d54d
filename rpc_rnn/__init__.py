"""Tutorial 6_5, second half: a language model split over RPC."""
