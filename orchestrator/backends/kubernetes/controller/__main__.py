"""`python -m orchestrator.backends.kubernetes.controller`: the controller of TrainRuns."""

import sys

from orchestrator.backends.kubernetes.controller.main import main

if __name__ == "__main__":
    sys.exit(main())
