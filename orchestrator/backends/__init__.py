"""How agents get onto nodes: the interface of a backend, and the backends that come with orch."""
