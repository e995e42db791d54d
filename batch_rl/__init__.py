"""Tutorial 6_8, second half: an agent that answers its observers in batches."""
