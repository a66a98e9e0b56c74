"""`python -m orchestrator.kubernetes.task`: the name by which pods start their task."""

import sys

from orchestrator.backends.kubernetes.pod.task import main

if __name__ == "__main__":
    sys.exit(main())
