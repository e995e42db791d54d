"""Tutorial 6_9: DistributedDataParallel and RPC in one model."""
