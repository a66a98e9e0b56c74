"""Checkpoints: verified files, atomic commits, no pickle."""
