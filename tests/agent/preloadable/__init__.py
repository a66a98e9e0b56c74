"""A small program that a nursery can preload; tests of orchestrator/agent/node/fork_server.py run it."""
