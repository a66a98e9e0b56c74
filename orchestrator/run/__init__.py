"""A run's record on disk: its folder, request, state, claims, events, and the registry of all runs."""
