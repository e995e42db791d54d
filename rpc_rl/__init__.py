"""Tutorial 6_5, first half: one agent and several observers train CartPole over RPC."""
