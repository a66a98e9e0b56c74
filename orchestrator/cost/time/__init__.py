"""Seconds per step: compute, communication and the pipeline."""
