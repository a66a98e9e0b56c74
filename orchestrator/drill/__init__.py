"""Fault injection into running jobs."""
