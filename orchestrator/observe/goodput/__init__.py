"""Where a run's time went: every second in one state, every fault with its cost, every sample
counted once."""
