"""Fault injection into running jobs: what a run survives is known before something breaks by itself."""
