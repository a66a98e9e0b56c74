"""`python -m orchestrator.kubernetes.controller`: the name by which the controller is started."""

import sys

from orchestrator.backends.kubernetes.controller.main import main

if __name__ == "__main__":
    sys.exit(main())
