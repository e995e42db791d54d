"""What every tutorial repeats and none of them teaches."""
