"""The search of `parallel=auto` and `orch tune`: every legal layout, exhaustive by bounding."""
