"""Wire names: modules that job scripts start by name. The code is in
`orchestrator.backends.slurm`."""
