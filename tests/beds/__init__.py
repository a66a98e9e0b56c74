"""Test beds: real clusters, plans, runs and workers that many tests start from."""
