"""Kubernetes: one Indexed Job (or JobSet) a run, one pod and one agent a node of the plan.

Pure: options, names, compact, rules, topology_request, pod, render, phases. Effects: client, backend, task, gather.
`docs/kubernetes.md` tells the life of a run.
"""
