"""Fits the cost model's parameters to a table of runs, to one row of it, or to a measured run."""
