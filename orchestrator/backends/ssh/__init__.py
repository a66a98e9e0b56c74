"""Jobs on another host, reached by the system's ssh. The orch that is installed on that host plans
and runs them."""
