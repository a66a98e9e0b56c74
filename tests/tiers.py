"""`python -m tests.tiers WORKERS`: what `make test` runs, three pytest processes beside each other.

The tiers on real clusters mostly wait, for schedulers and for pods, everything else computes: together they take little
longer than the rest alone. What the rest says is seen at once; what the tiers say, skips with their reasons included,
when all are over.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest")
TIERS = {
    # The cluster tests of one file keep to one worker, which has clusters of its own.
    "Slurm": ("-n", "2", "--dist", "loadgroup", "-rs", "-m", "slurm and not full", "tests/slurm"),
    # One bed after the other: each is a whole control plane. On a new machine its programs are built first.
    "Kubernetes": ("-p", "no:xdist", "-rs", "-m", "kubernetes and not full", "tests/kubernetes"),
}
STARTS = {"Kubernetes": (sys.executable, "-m", "tests.beds.kubernetes.ready")}
REST = ("--dist", "worksteal", "-m", "not slurm and not kubernetes and not full")


def start(tier: str) -> tuple[str, ...]:
    return STARTS.get(tier, PYTEST)


def stderr(tier: str) -> int | None:
    """That of a start of its own is seen at once: what it waits for."""
    return None if tier in STARTS else subprocess.STDOUT


def main(argv: list[str]) -> int:
    """The exit code of the first that failed; 130 when interrupted, by SIGTERM too."""
    workers = argv[0] if argv else "3"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell in the background lets it be ignored
    with contextlib.ExitStack() as files:
        said = {name: files.enter_context(tempfile.TemporaryFile()) for name in TIERS}
        tiers = {
            name: subprocess.Popen(
                [*STARTS.get(name, PYTEST), *words], cwd=ROOT, stdout=said[name], stderr=stderr(name)
            )
            for name, words in TIERS.items()
        }
        rest = subprocess.Popen([*PYTEST, "-n", workers, *REST], cwd=ROOT)
        everyone = (rest, *tiers.values())

        def end(*_: object) -> None:
            for process in everyone:
                process.send_signal(signal.SIGINT)  # their fixtures end daemons and clusters
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, end)
        try:
            codes = [rest.wait()]
            for name, tier in tiers.items():
                if tier.poll() is None:
                    print(f"waiting for the {name} tier", flush=True)
                codes.append(tier.wait())
        except KeyboardInterrupt:  # a terminal has told all of us
            codes = [130, *(process.wait() for process in everyone)]
        for name, output in said.items():
            output.seek(0)
            print(f"\n{f' the {name} tier ':=^80}\n{output.read().decode(errors='replace')}", end="", flush=True)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
