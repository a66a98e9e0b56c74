"""The coordinator of a run, its election, and what it decides."""
