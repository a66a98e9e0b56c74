"""Context parallelism: one sequence over several ranks, by the plan's `parallel.cp_method`."""
