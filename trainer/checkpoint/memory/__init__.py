"""Copies of the state in the memory of two nodes, between durable checkpoints: a lost node costs a step, not a save."""
