"""Measures a cluster (`orch bench`). The record is kept in orch's home and read by every later plan
of that cluster."""
