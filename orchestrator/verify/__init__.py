"""`orch verify` without torch: which layouts to hold against one process, and the pages that say how it went."""
