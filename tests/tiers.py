"""`python -m tests.tiers WORKERS`: what `make test` runs, two pytest processes beside each other.

The Slurm tier mostly waits for a scheduler, everything else computes: together they take little longer than the rest
alone. What the rest says is seen at once; what the tier says, skips with their reasons included, when both are over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest")
#: The cluster tests of one file keep to one worker, which has clusters of its own.
SLURM = ("-n", "2", "--dist", "loadgroup", "-rs", "-m", "slurm and not full", "tests/slurm")
REST = ("--dist", "worksteal", "-m", "not slurm and not kubernetes and not full")


def main(argv: list[str]) -> int:
    """The exit code of the first of the two that failed; 130 when interrupted, by SIGTERM too."""
    workers = argv[0] if argv else "3"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell in the background lets it be ignored
    with tempfile.TemporaryFile() as said:
        tier = subprocess.Popen([*PYTEST, *SLURM], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        rest = subprocess.Popen([*PYTEST, "-n", workers, *REST], cwd=ROOT)

        def end(*_: object) -> None:
            for process in (rest, tier):
                process.send_signal(signal.SIGINT)  # their fixtures end daemons and clusters
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, end)
        try:
            codes = [rest.wait()]
            if tier.poll() is None:
                print("waiting for the Slurm tier", flush=True)
            codes.append(tier.wait())
        except KeyboardInterrupt:  # a terminal has told all of us
            codes = [130, rest.wait(), tier.wait()]
        said.seek(0)
        print(f"\n{' the Slurm tier ':=^80}\n{said.read().decode(errors='replace')}", end="", flush=True)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
