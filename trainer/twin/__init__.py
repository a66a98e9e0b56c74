"""Runs one rank of a layout without data and without peers, to see its memory and its collectives
(`orch twin`)."""
