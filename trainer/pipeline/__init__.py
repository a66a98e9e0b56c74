"""Pipeline parallelism: one runtime for every schedule of `orchestrator.plan.schedules`."""
