"""`orch verify` without torch: which layouts to compare with one process, and the pages of the
result."""
