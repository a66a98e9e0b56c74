"""Every technique of one card against float64 on the host."""
