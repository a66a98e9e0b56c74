"""Pages for a terminal. Pure text."""
