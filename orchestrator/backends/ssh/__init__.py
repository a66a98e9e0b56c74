"""Jobs on another host, reached by the system's ssh: the orch that is installed there plans and
runs them."""
