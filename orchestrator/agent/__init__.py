"""One agent a node: it joins the coordinator, starts the workers of its node, and owns their exit
codes."""
