"""The search of `parallel=auto`: the fastest legal layout that fits, found by exact branch and
bound."""
