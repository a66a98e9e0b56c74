"""The channel and the messages between the agents and the coordinator."""
