"""Wire names, by which job scripts start modules. The code is in `orchestrator.backends.slurm`."""
