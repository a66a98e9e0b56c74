"""Bytes on each rank, by category."""
