"""Measures steps: memory by category, and the timeline of actions, phases and transfers."""
