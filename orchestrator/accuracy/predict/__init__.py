"""`orch predict`: runs the cost model on a table of training runs and scores its predictions."""
