"""Tutorials 6_2 and 6_7: a ResNet split in two, in one process and over RPC, as a pipeline."""
