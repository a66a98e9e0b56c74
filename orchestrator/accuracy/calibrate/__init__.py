"""Fits of the cost model's parameters: to a table of runs, to one row of it, to a measured run."""
