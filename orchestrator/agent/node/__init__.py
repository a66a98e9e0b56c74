"""The agent of one node, and its worker processes."""
