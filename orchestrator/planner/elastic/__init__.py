"""Plans of one job for other numbers of nodes, and on other nodes."""
