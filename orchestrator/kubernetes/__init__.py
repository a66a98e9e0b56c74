"""Wire names: modules that pods start by name. The code is in
`orchestrator.backends.kubernetes`."""
