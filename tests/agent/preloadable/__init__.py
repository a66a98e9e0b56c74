"""A small program that a fork server can preload; tests of orchestrator/agent/node/fork_server.py
run it."""
