"""`orch predict`: the cost model on a table of training runs, and how far it is off."""
