"""orch: from "this model, this cluster" to a running, observed training job.

Data walks one way: conf -> plan -> launch request -> agent -> trainer -> metrics.
Nothing in this package imports torch.

The Python API is `orchestrator.api`: `from orchestrator import api as orch` (docs/programs.md).
"""

__version__ = "0.2.0.dev0"  # the one place; tags are `v0.2.0` and the like
