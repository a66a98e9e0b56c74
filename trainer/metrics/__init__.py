"""Measuring a step: memory by category and the timeline of what ran when."""
