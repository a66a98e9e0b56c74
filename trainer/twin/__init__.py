"""One rank of a layout, run alone without data and without peers: its memory and its collectives
(`orch twin`)."""
