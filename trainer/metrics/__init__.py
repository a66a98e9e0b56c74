"""Measuring a run: step reports, phase times, memory by category, communication by axis."""
