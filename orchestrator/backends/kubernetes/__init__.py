"""Kubernetes: one Indexed Job (or JobSet) a run, one pod and one agent a node of the plan.

Pure: options, names, objects/, phases, pod/rank_mapping. Effects: everything else.
docs/kubernetes.md describes a run.
"""
