"""Wire name: an orch on another machine starts `orchestrator.remote` here through ssh."""
