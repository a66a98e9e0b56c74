"""Seconds of one step: compute, communication, pipeline."""
