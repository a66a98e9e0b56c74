"""Everything that talks to other ranks: process groups, collectives and what they cost, small
control messages."""
