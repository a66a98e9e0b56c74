"""Programs of users, each an ordinary script: trials start them under orch and torchrun."""

#: The words with which `orch run` simulates several nodes on this machine.
SIMULATED_NODES = ["cluster=local_nodes"]
