"""Memory and disk of the host, for what a device has no room for."""
