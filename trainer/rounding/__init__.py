"""Measures the error of matrix products in 8 bits, on real batches of a run, in one process."""
