"""The objects of a run. Pure."""
