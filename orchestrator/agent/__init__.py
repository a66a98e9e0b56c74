"""One agent per node: it joins the coordinator, starts its node's workers, and owns their exit
codes."""
