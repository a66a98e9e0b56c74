"""The network as data: one model, importers for every format, exporters, and the difference of
two."""
