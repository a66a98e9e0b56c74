"""The optimizer on flat shards, gradient clipping, loss scaling, learning-rate schedules."""
