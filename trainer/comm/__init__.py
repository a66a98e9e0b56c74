"""Communication with other ranks: process groups, collectives and their cost, small control
messages."""
