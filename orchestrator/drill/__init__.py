"""Faults on purpose: what a run survives is known before something breaks by itself."""
