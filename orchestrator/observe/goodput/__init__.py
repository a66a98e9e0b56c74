"""Accounts for a run's time: every second in one state, every fault with its cost, every sample
counted once."""
