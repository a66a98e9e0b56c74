"""The network as data: one model, importers for every spelling of it, exporters, and what changed between two."""
