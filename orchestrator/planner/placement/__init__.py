"""The order of parallelism axes and the nodes on which a job's ranks are placed."""
