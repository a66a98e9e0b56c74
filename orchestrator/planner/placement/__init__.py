"""Which rank sits on which GPU of which node."""
