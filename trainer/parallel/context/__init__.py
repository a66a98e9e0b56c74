"""Context parallelism: one sequence over several ranks. The method is `parallel.cp_method` of the
plan."""
