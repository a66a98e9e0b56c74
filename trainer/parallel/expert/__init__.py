"""Expert parallelism: experts of a layer on several ranks."""
