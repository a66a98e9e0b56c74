"""The headline results of the papers that this project stands on, computed by the planner and put
beside theirs."""
