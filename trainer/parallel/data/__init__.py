"""Data parallelism on flat buckets: layout (pure), reduction, ZeRO."""
