"""The controller of `TrainRun` resources: owns where runs are placed, starts them, heals them, says
how they fare."""
