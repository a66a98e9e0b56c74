"""The controller of `TrainRun` resources: places runs, starts them, heals them, and reports their
state."""
