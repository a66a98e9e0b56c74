"""Submitting: from a configuration to a running job."""
