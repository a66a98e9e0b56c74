"""Every technique on one node of GPUs, beside a plain loop and torchtitan, with the node's own
ceilings."""
