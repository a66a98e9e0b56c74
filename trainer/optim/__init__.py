"""The optimizer on flat shards, gradient clipping, learning-rate schedules, precision recipes."""
