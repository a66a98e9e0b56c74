"""From a plan to running agents: the launch request, the run folder, and the backends that send requests."""
