"""The cost of a layout in seconds and bytes. Pure functions, without torch."""
