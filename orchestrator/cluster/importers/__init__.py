"""Readers of the spellings that sites describe their network in."""
