"""Submitting a job: the way from a configuration to a running job."""
