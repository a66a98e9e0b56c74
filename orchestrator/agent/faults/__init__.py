"""What went wrong, whose fault it is, and what to do. Pure."""
