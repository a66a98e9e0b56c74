"""Linears that compute in few bits: those that stay wide, and the measurement of all errors."""
