"""What a cluster really gives: measured by `orch bench`, kept in orch's home, read by every later plan of it."""
