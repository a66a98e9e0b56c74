"""The part of `orch verify` without torch: the layouts to compare with one process, and the pages
of the results."""
