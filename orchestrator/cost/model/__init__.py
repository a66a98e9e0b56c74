"""Layers, parameters, FLOPs and pipeline stages of a transformer, from its shapes."""
