"""`python -m orchestrator.slurm.task`: the name by which job scripts that are queued already start
their task."""

import sys

from orchestrator.backends.slurm.job.task import main

if __name__ == "__main__":
    sys.exit(main())
