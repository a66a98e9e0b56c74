"""`python -m orchestrator.backends.kubernetes.pod`: process 1 of every pod of a run."""

import sys

from orchestrator.backends.kubernetes.pod.task import main

if __name__ == "__main__":
    sys.exit(main())
