"""Predicts what a model costs on a cluster, and decides where each rank goes.

Pure functions, without torch.
"""
