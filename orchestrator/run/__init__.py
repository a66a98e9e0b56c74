"""A run's record on disk: its folder, request, state, epoch leases, and the registry of all
runs."""
