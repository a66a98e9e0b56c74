"""What a model learns to predict: one objective per file.

An objective makes the inputs and targets of a micro-batch from its tokens, as a pure function of
the tokens and of the samples' numbers in the run's data order. So every layout, a resumed run and
one that continues on other nodes train on the same inputs and targets.

The next token, the default, needs no file: `trainer.data.batch.from_windows` makes such batches.
"""
