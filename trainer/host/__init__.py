"""Memory and disk of the host, for state that does not fit on a device."""
