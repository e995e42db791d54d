"""After 6_9: one small transformer, sharded every way."""
