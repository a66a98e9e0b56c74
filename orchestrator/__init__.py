"""orch: from "this model, this cluster" to a running, observed training job.

Data walks one way: conf -> plan -> launch request -> agent -> trainer -> metrics.
Nothing in this package imports torch.
"""

__version__ = "0.1.0"
