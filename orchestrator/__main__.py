"""`python -m orchestrator`: the command `orch`, where it is not on PATH."""

import sys

from orchestrator.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
