"""Detects faults, attributes them, and decides what follows. Pure."""
