"""The planner: what a model costs on a cluster, and where each rank goes. Pure functions; no
torch."""
