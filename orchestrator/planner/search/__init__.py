"""The search of `parallel=auto`: exact branch and bound for the fastest legal layout that fits."""
