"""The tests run the real scripts, on the CPU, and look at numbers."""
