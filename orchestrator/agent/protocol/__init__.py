"""The channel and the messages between agents and coordinator."""
