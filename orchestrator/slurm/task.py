"""`python -m orchestrator.slurm.task`: starts `orchestrator.backends.slurm.job.task`.

Job scripts that wait in a queue keep this name. A newer orch that was installed meanwhile must
still answer to it.
"""

import sys

from orchestrator.backends.slurm.job.task import main

if __name__ == "__main__":
    sys.exit(main())
