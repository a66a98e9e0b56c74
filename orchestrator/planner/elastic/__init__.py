"""Plans for other numbers of nodes."""
