"""What a layout costs: seconds and bytes. Pure functions; no torch."""
