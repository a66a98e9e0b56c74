"""One agent per node: joins the coordinator, starts its workers, and owns their exit codes."""
