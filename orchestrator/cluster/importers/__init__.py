"""Readers of the formats in which sites describe their network."""
