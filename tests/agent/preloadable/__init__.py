"""A small program that a nursery can preload; tests of orchestrator/agent/nursery.py run it."""
