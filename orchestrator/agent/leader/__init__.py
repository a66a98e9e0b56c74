"""The coordinator of a run, and how it is elected."""
